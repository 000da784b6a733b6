"""What a schedule's error shows."""

from __future__ import annotations

from collections.abc import Mapping

from pipegraph.errors import ScheduleError
from pipegraph.schedule.replay import marked_grid, slots
from pipegraph.schedule.schedule import Schedule


def fault(schedule: Schedule, problem: str, places: Mapping[int, int], advice: str) -> ScheduleError:
    """Return an error that says what is wrong, draws the places (rank → position) and says what to try."""
    picture = marked_grid(schedule.cells(), slots(schedule.arrays), places)
    return ScheduleError(f"{schedule.name}: {problem}\n{picture}", f"{advice[0].lower()}{advice[1:]}", places)
