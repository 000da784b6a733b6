"""The ranks that write and read a checkpoint together: what one of them cannot do, none of them does."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from pipegraph.errors import CheckpointError, PipegraphError
from pipegraph.runtime.processes.group import Group, lost_connections
from pipegraph.runtime.processes.rank_grid import RankGrid, single
from pipegraph.runtime.processes.world import LoneProcess, World

_WHERE: Final = "save() or load()"
_FIRST: Final = 0

_T = TypeVar("_T")


class CheckpointRanks:
    """All ranks of a pipeline, or of the pipelines of a mesh, and messages between them that are no part of a step.

    They have connections of their own, because a thread may write a checkpoint while steps use the pipeline's.

    Args:
        world: the processes. The first message connects them.
        guard: the context of each message.

    Attributes:
        rank: this process's.
        grid: of all ranks.
    """

    def __init__(
        self, world: World | LoneProcess, guard: AbstractContextManager[None], group: Group | None = None
    ) -> None:
        self._world, self._guard, self._group = world, guard, group
        self.rank: int = world.rank if isinstance(world, World) else _FIRST
        self.grid: RankGrid = world.grid if isinstance(world, World) else single(1)

    @property
    def size(self) -> int:
        return self.grid.size

    @property
    def is_first(self) -> bool:
        """Whether this rank does what one rank does for all."""
        return self.rank == _FIRST

    def connect(self) -> None:
        """Connect the ranks, unless they are. Collective."""
        self._connected()

    def in_thread(self) -> CheckpointRanks:
        """The same ranks for another thread, where a connection that is lost does not end the pipeline."""
        return CheckpointRanks(self._world, nullcontext(), self._connected())

    def collect(self, value: Any) -> list[Any] | None:
        """What each rank has, by rank, on the first one; None elsewhere. Collective."""
        group = self._connected()
        with self._guard, lost_connections(None, _WHERE):
            if group is None:
                return [value]
            if not self.is_first:
                _send(group, value, _FIRST)
                return None
            return [value, *(_receive(group, sender) for sender in range(1, self.size))]

    def scatter(self, values: Sequence[_T] | None) -> _T:
        """What the first rank has for this one. Collective; only the first rank gives values."""
        group = self._connected()
        with self._guard, lost_connections(None, _WHERE):
            if values is None:
                assert group is not None, "a process that is alone is the first"
                value: _T = _receive(group, _FIRST)
                return value
            if group is not None:
                for receiver in range(1, self.size):
                    _send(group, values[receiver], receiver)
            return values[_FIRST]

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, by rank, on all of them. Collective."""
        all_values = self.collect(value)
        return self.scatter(None if all_values is None else [all_values] * self.size)

    def agree(self, work: Callable[[], _T]) -> _T:
        """Do what may fail on one rank. Every rank then raises the same CheckpointError. Collective.

        `work` sends no messages.
        """
        problem: str | None = None
        cause: Exception | None = None
        try:
            done = work()
        except Exception as error:
            cause = error
            problem = str(error) if isinstance(error, PipegraphError) else f"{type(error).__name__}: {error}"
        problems = self.gather(problem)
        failing = next((rank for rank, message in enumerate(problems) if message is not None), None)
        if failing is not None:
            where = "" if self.size == 1 else f"{self.grid.text(failing)}: "
            raise CheckpointError(f"{where}{problems[failing]}") from (cause if failing == self.rank else None)
        return done

    def _connected(self) -> Group | None:
        """The connections; None for a plain process. Collective at the first call."""
        if self._group is None and isinstance(self._world, World):
            with self._guard, lost_connections(None, _WHERE):
                self._group = self._world.connect("checkpoint", range(self.size), torch.device("cpu"))
        return self._group


def _send(group: Group, value: Any, receiver: int) -> None:
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    for tensor in (torch.tensor([content.numel()]), content):
        group.wait(group.send(tensor, receiver))


def _receive(group: Group, sender: int) -> Any:
    length = torch.zeros(1, dtype=torch.int64)
    group.wait(group.receive(length, sender))
    content: Tensor = torch.empty(int(length), dtype=torch.uint8)
    group.wait(group.receive(content, sender))
    return pickle.loads(content.numpy().tobytes())
