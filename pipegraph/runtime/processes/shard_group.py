"""A line of ranks that share parameters: they gather them, and add up gradients for each rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from pipegraph.runtime import internals
from pipegraph.runtime.processes.group import lost_connections

# torch 2.13 has given both another name.
_GATHER: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ShardLine:
    """Connections between ranks that share parameters. Its messages are torch's collectives, which profilers see.

    Args:
        lines: the ranks of every such line, by their numbers in the default group. All of them make theirs together.

    Attributes:
        size: how many ranks a line has.
        ranks: of this one.
        place: this process's among them.
        scatters: whether a rank gets its part of a sum alone.
    """

    def __init__(self, lines: Sequence[Sequence[int]], device: torch.device, timeout: float) -> None:
        self.size = len(lines[0])
        self.ranks = tuple(next(line for line in lines if dist.get_rank() in line))
        self.place = self.ranks.index(dist.get_rank())
        self.scatters = device.type == "cuda"
        self._group: dist.ProcessGroup | None = internals.make_group(lines, device.type, timeout)

    def start_gather(self, rows: Tensor) -> dist.Work:
        """Start to gather the rows [ranks, elements] of which each rank has its own."""
        with lost_connections(None):
            work: dist.Work = _GATHER(rows.view(-1), rows[self.place], group=self._group, async_op=True)
            return work

    def start_reduce(self, rows: Tensor) -> tuple[dist.Work, Tensor]:
        """Start to add up rows [ranks, elements] over ranks, which uses them up. Each rank gets its own.

        Gloo adds up all of them on every rank whatever it is asked for. So it is asked for that: it then needs no copy
        of them, and its work says when it is done.

        Returns:
            The work, and what `own_row` finds the sum in once that is waited for.
        """
        work: dist.Work
        with lost_connections(None):
            if not self.scatters:
                work = dist.all_reduce(rows, group=self._group, async_op=True)
                return work, rows
            received = torch.empty_like(rows[0])
            work = _REDUCE(received, rows.view(-1), group=self._group, async_op=True)
            return work, received

    def own_row(self, reduced: Tensor) -> Tensor:
        """This rank's row of what was reduced, with memory of its own."""
        return reduced if reduced.dim() == 1 else reduced[self.place].clone()

    def wait(self, work: dist.Work) -> None:
        """Wait for what was started; on a GPU the current stream waits."""
        with lost_connections(None):
            work.wait()

    def close(self) -> None:
        """Close the connections, which wakes every rank that waits for this one."""
        group, self._group = self._group, None
        if group is not None:
            internals.release_groups([group])
