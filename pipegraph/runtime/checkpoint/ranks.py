"""The ranks that write and read a checkpoint together: what one of them cannot do, none of them does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch.distributed as dist

from pipegraph.errors import CheckpointError, PipegraphError, RuntimeFault
from pipegraph.runtime import internals
from pipegraph.runtime.processes.group import lost_connections
from pipegraph.runtime.processes.rank_grid import single
from pipegraph.runtime.processes.world import LoneProcess, World

_T = TypeVar("_T")


class CheckpointRanks:
    """All ranks of a pipeline, or of the pipelines of a mesh, for what is not part of a step.

    They have a gloo group of torch's own, because torch.distributed.checkpoint takes no other, and because a thread may
    write a checkpoint while steps use the pipeline's.

    Attributes:
        rank: this process's.
        grid: of all ranks.
    """

    def __init__(
        self, world: World | LoneProcess, guard: AbstractContextManager[None], group: dist.ProcessGroup | None = None
    ) -> None:
        self._world, self._guard, self._group = world, guard, group
        self.rank, self.grid = (world.rank, world.grid) if isinstance(world, World) else (0, single(1))

    @property
    def size(self) -> int:
        return self.grid.size

    def group(self) -> dist.ProcessGroup | None:
        """The group of the ranks; None for a plain process. Collective at the first call."""
        if isinstance(self._world, World) and self._group is None:
            self._group = internals.make_group(self._world.processes, "cpu", self._world.timeout)
        return self._group

    def in_thread(self) -> CheckpointRanks:
        """The same ranks for a thread of its own: a connection that is lost there does not end the pipeline."""
        return CheckpointRanks(self._world, nullcontext(), self.group())

    def together(self, collective: Callable[[], _T]) -> _T:
        """Do what all ranks do together. Raises RuntimeFault if one of them is gone."""
        with self._guard, lost_connections(None):
            return collective()

    def gather(self, own: Any) -> list[Any]:
        """What each rank has, by rank. Collective."""
        if isinstance(self._world, LoneProcess):
            return [own]

        def gather() -> list[Any]:
            found: list[Any] = [None] * self.size
            dist.all_gather_object(found, own, group=self.group())
            return found

        return self.together(gather)

    def agree(self, work: Callable[[], _T]) -> _T:
        """Do what may fail on one rank. Every rank then raises the same CheckpointError. Collective.

        `work` has no collectives.
        """
        problem: str | None = None
        cause: Exception | None = None
        try:
            done = work()
        except RuntimeFault:
            raise
        except Exception as error:
            cause = error
            problem = str(error) if isinstance(error, PipegraphError) else f"{type(error).__name__}: {error}"
        problems = self.gather(problem)
        failing = next((rank for rank, said in enumerate(problems) if said is not None), None)
        if failing is not None:
            where = "" if self.size == 1 else f"{self.grid.text(failing)}: "
            raise CheckpointError(f"{where}{problems[failing]}") from (cause if failing == self.rank else None)
        return done

    def close(self) -> None:
        """Close the connections."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            internals.release_groups([group])
