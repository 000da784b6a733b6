"""The processes of a pipeline: where they are in the mesh, and the texts they exchange."""

from __future__ import annotations

from collections.abc import Sequence

from pipegraph.runtime.processes.clock import ClockOffset
from pipegraph.runtime.processes.faults import FaultGuard
from pipegraph.runtime.processes.group import lost_connections
from pipegraph.runtime.processes.rank_grid import DATA, DIMENSIONS, RankGrid, single
from pipegraph.runtime.processes.world import LoneProcess, World
from pipegraph.schedule import Schedule


class PipelineRanks:
    """The part of `Pipeline` that is about its processes."""

    schedule: Schedule
    ranks: tuple[int, ...]
    _processes: World | LoneProcess
    _guard: FaultGuard

    @property
    def grid(self) -> RankGrid:
        """Where the ranks of the mesh are; without a mesh those of this pipeline."""
        return self._processes.grid if isinstance(self._processes, World) else single(self.schedule.ranks)

    @property
    def mesh_ranks(self) -> tuple[int, ...]:
        """For each rank of the schedule, its number in the grid."""
        if isinstance(self._processes, World):
            return self._processes.pipeline
        return tuple(range(self.schedule.ranks))

    @property
    def dp_rank(self) -> int:
        """The place of this process among the data-parallel ranks, for samplers: which share of a batch it is given."""
        world = self._processes
        return world.grid.line(world.rank, *DATA).index(world.rank) if isinstance(world, World) else 0

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks; 1 without a mesh."""
        world = self._processes
        return world.grid.length(*DATA) if isinstance(world, World) else 1

    def gather(self, figures: Sequence[float], everywhere: bool = False) -> list[list[float]]:
        """The figures of every process of this pipeline, by rank. Collective: all must call it, with equally many.

        No process continues before all have called. In a mesh these are the ranks along `pp`, or all with `everywhere`.
        """
        with self._guard, lost_connections(None, "gather()"):
            return self._processes.gather(figures, *(DIMENSIONS if everywhere else ()))

    def gather_text(self, text: str, everywhere: bool = False) -> list[str]:
        """The texts of the same processes, by rank. Collective: all must call it."""
        with self._guard, lost_connections(None, "gather_text()"):
            return self._processes.gather_text(text, *(DIMENSIONS if everywhere else ()))

    def clock_offset(self) -> ClockOffset:
        """Measure by messages how far this process's clock is from rank 0's. Collective: every rank of the mesh must
        call it."""
        with self._guard, lost_connections(None, "clock_offset()"):
            return self._processes.clock_offset()
