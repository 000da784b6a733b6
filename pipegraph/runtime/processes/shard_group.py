"""A line of ranks that share parameters: they gather them, and add up gradients for each rank's part.

If the line has replicas, gradients are added up over these as well:

NCCL   reduction over the line ─▶ this rank's row ─▶ all-reduce over the ranks that have the same row
gloo   all-reduce over all ranks of all replicas  ─▶ this rank's row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipegraph import collectives
from pipegraph.collectives import CompositeWork
from pipegraph.device import Device
from pipegraph.runtime.processes.group import lost_connections
from pipegraph.runtime.processes.rank_grid import DATA, REPLICATE, SHARD, RankGrid
from pipegraph.torch_private.distributed import make_group, release_groups, uses_nccl


class Reduction(NamedTuple):
    """One message of a sum that is under way.

    Attributes:
        way: "reduce" or "all_reduce".
        size: bytes of the whole.
        ranks: that take part.
    """

    work: dist.Work
    way: str
    size: int
    ranks: tuple[int, ...]


class ShardLine:
    """Connections between ranks that share parameters. Its messages are torch's collectives, which profilers see.

    Making it is collective for all ranks of the grid.

    Args:
        grid: where the ranks are.
        processes: of each rank, its number in the default group.

    Attributes:
        size: how many ranks a line has.
        ranks: of this one, by their numbers in the default group.
        place: this process's among them.
    """

    def __init__(self, grid: RankGrid, processes: Sequence[int], device: torch.device, timeout: float) -> None:
        self._grid, self._processes = grid, processes
        self.size, self.ranks = grid.length(SHARD), self._line(SHARD)
        self.place = self.ranks.index(dist.get_rank())
        self._device = Device(device)
        self._replica_stream = self._device.stream() if uses_nccl(device) else None
        summed = (SHARD,) if grid.length(REPLICATE) == 1 else DATA if self._replica_stream is None else (REPLICATE,)
        self._summed = self._line(*summed)
        groups = {names: self._connect(names, device, timeout) for names in dict.fromkeys(((SHARD,), summed))}
        self._group, self._sums = groups[SHARD,], groups[summed]

    def start_gather(self, rows: Tensor) -> dist.Work | CompositeWork:
        """Start to gather the rows [ranks, elements] of which each rank has its own."""
        with lost_connections(None):
            return collectives.start_gather(rows, self.place, self._group)

    def start_reduce(self, rows: Tensor) -> tuple[list[Reduction], Callable[[], Tensor]]:
        """Start to sum rows [ranks, elements] over ranks and replicas, which may change them. Each rank gets its row.

        NCCL's sum over replicas follows the sum over the line in a separate stream, so that all ranks start both in the
        same order and no rank waits. Gloo has no streams: it sums all rows on every rank of all replicas.

        Returns:
            The messages, and a function that returns this rank's sum, in separate memory, once they are waited for.
        """
        with lost_connections(None):
            if self._sums is not self._group and self._replica_stream is None:
                work = dist.all_reduce(rows, group=self._sums, async_op=True)
                return [Reduction(work, "all_reduce", rows.nbytes, self._summed)], rows[self.place].clone
            work, own_sum = collectives.start_reduce(rows, self._group)
            started = [Reduction(work, "reduce", rows.nbytes, self.ranks)]
            if self._sums is not self._group:
                local_sum = own_sum()
                with self._device.on_stream(self._replica_stream):
                    work.wait()  # of this stream
                    work = dist.all_reduce(local_sum, group=self._sums, async_op=True)
                started.append(Reduction(work, "all_reduce", local_sum.nbytes, self._summed))
            return started, own_sum

    def wait(self, *works: dist.Work | CompositeWork) -> None:
        """Wait for what was started; on a GPU the current stream waits."""
        with lost_connections(None):
            for work in works:
                work.wait()

    def close(self) -> None:
        """Close the connections, which wakes every rank that waits for this one."""
        groups = dict.fromkeys(group for group in (self._sums, self._group) if group is not None)
        self._group = self._sums = None
        release_groups(list(groups))

    def _line(self, *names: str) -> tuple[int, ...]:
        grid_rank = self._processes.index(dist.get_rank())
        return tuple(self._processes[rank] for rank in self._grid.line(grid_rank, *names))

    def _connect(self, names: tuple[str, ...], device: torch.device, timeout: float) -> dist.ProcessGroup | None:
        numbered = [[self._processes[rank] for rank in line] for line in self._grid.lines(*names)]
        return make_group(numbered, device.type, timeout)
