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
    """

    def __init__(self, lines: Sequence[Sequence[int]], device: torch.device, timeout: float) -> None:
        self.size = len(lines[0])
        self._group: dist.ProcessGroup | None = internals.make_group(lines, device.type, timeout)

    def start_gather(self, received: Tensor, sent: Tensor) -> dist.Work:
        """Start to gather what each rank sends [elements] into the rows of `received` [ranks, elements]."""
        with lost_connections(None):
            work: dist.Work = _GATHER(received.view(-1), sent, group=self._group, async_op=True)
            return work

    def start_reduce(self, received: Tensor, sent: Tensor) -> dist.Work:
        """Start to add up the rows of `sent` [ranks, elements] over ranks. Each receives its own [elements]."""
        with lost_connections(None):
            work: dist.Work = _REDUCE(received, sent.view(-1), group=self._group, async_op=True)
            return work

    def wait(self, work: dist.Work) -> None:
        """Wait for what was started; on a GPU the current stream waits."""
        with lost_connections(None):
            work.wait()

    def close(self) -> None:
        """Close the connections, which wakes every rank that waits for this one."""
        group, self._group = self._group, None
        if group is not None:
            internals.release_groups([group])
