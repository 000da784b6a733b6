"""The pass that makes whole backwards of divided ones where nothing waits for it."""

from __future__ import annotations

from typing import Final

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.lifetimes import peak_activations
from pipegraph.schedule.schedule import Schedule, require_schedule
from pipegraph.schedule.simulate import simulate
from pipegraph.schedule.times import Times, require_times

EQUAL: Final = 1e-9
"""Makespans that differ by less than this part are equal."""

_TRIES = 500


def join_backwards(schedule: Schedule, times: Times, tries: int = _TRIES) -> Schedule:
    """Return the schedule with each I and its W joined to a B in the place of the I, if that makes no step longer.

    ``0I3 … 0W3`` becomes ``0B3``: its gradient leaves later than I's would, and the memory that W frees is freed
    earlier. A B is assumed to last as long as I and W together. The kernels of a whole backward take less time, because
    they compute and read once the values that both halves need. The simulated makespan does not show this gain.

    All backwards are tried together; if that makes the simulated step longer, the first half of them is tried and then
    the second, and so on.

    Args:
        schedule: one without transfers and collectives, which `lower` places.
        times: of its stages, with their transfers.
        tries: the largest number of orders that are simulated.

    Raises ScheduleError as `simulate` does, and for a schedule that has transfers or collectives.
    """
    require_schedule("join_backwards", schedule)
    require_times("join_backwards", times)
    for kind, present in (("transfers", schedule.lowered), ("collectives", bool(schedule.collectives))):
        if present:
            remedy = "without_transfers(schedule)" if schedule.lowered else "schedule.changed(collectives=())"
            raise ScheduleError(f"{schedule.name} has {kind} already, which depend on the order.", f"{remedy}, first.")
    divided = [(action.stage, action.microbatch) for row in schedule.actions for action in row if action.kind is Kind.I]
    longest = simulate(schedule, times).makespan * (1 + EQUAL)
    most = peak_activations(schedule)
    full_backwards: set[tuple[int, int]] = set()
    waiting = [divided] if divided else []
    while waiting and tries > 0:
        candidates, tries = waiting.pop(), tries - 1
        tried = _joined(schedule, full_backwards.union(candidates))
        peaks = zip(peak_activations(tried), most, strict=True)
        if simulate(tried, times).makespan <= longest and all(peak <= limit for peak, limit in peaks):
            full_backwards.update(candidates)
        elif len(candidates) > 1:
            half = len(candidates) // 2
            waiting += [candidates[half:], candidates[:half]]  # the first half is next
    return _joined(schedule, full_backwards) if full_backwards else schedule


def _joined(schedule: Schedule, full_backwards: set[tuple[int, int]]) -> Schedule:
    def changed(action: Action) -> Action | None:
        if (action.stage, action.microbatch) not in full_backwards or action.kind is Kind.F:
            return action
        return Action(action.stage, Kind.B, action.microbatch) if action.kind is Kind.I else None

    rows = (tuple(new for action in row if (new := changed(action)) is not None) for row in schedule.actions)
    return schedule.changed(name=f"{schedule.name}, joined", actions=tuple(rows))
