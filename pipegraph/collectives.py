"""Collectives between ranks that divide a tensor into rows, one for each: in the way that is fastest on their backend.

           NCCL                              gloo
gather     all-gather                        a large row: each rank broadcasts its own; a small one: all-gather
reduce     reduce-scatter                    all-to-all ─▶ each rank adds up what it was sent

gloo's all-gather copies everything twice more, and its reduce-scatter adds up all rows on every rank: two processes
gather 32 MiB by broadcasts in 0.37 of the time, and reduce them by an all-to-all in 0.38 (two cores of an AMD EPYC).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

_LARGE: Final = 2**20
"""Bytes of all rows together from which gloo's broadcasts are faster, although each one adds its latency."""


class CompositeWork:
    """Several messages that are waited for together."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """A future that is done when all messages have come."""
        import torch

        return torch.futures.collect_all([work.get_future() for work in self._works])


def start_gather(rows: Tensor, place: int, group: ProcessGroup | None) -> Work | CompositeWork:
    """Start to gather rows [ranks, elements]. Each rank has the row at its place.

    Args:
        place: of this rank in the group.
        group: None for the default one.
    """
    import torch.distributed as dist

    if dist.get_backend(group) != "gloo" or rows.nbytes < _LARGE:
        # torch 2.13 has given it another name.
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work: Work = gather(rows.view(-1), rows[place], group=group, async_op=True)
        return work
    return CompositeWork([dist.broadcast(row, group=group, group_src=at, async_op=True) for at, row in enumerate(rows)])


def start_reduce(rows: Tensor, group: ProcessGroup | None) -> tuple[Work, Callable[[], Tensor]]:
    """Start to add up rows [ranks, elements] over the ranks. Each rank gets the sum of the row at its place.

    Returns:
        What to wait for, and what then returns this rank's sum [elements].
    """
    import torch
    import torch.distributed as dist

    if dist.get_backend(group) == "gloo":
        received = torch.empty_like(rows)
        work = dist.all_to_all_single(received.view(-1), rows.view(-1), group=group, async_op=True)
        return work, partial(torch.sum, received, 0)
    rank_sum = torch.empty_like(rows[0])
    reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(rank_sum, rows.view(-1), group=group, async_op=True), lambda: rank_sum
