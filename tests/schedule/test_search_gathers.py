"""Orders of sharded stages that a search finds: no slower, and gathered less often."""

from pathlib import Path

import pytest

from pipegraph.errors import ScheduleError
from pipegraph.schedule import (
    Schedule,
    Times,
    build,
    check,
    from_csv,
    lower,
    peak_activations,
    search,
    simulate,
    to_csv,
)
from pipegraph.schedule.order_search import grouped_schedules
from tests.messages import refused
from tests.schedule.test_csv import torch_lowered
from tests.schedule.test_residency import fewest_gathers
from tests.torch_version import TORCH

P, V, M, RESIDENT = 4, 8, 16, 3


def fewest(schedule: Schedule, resident: int) -> tuple[int, ...]:
    """The proved minimum of each rank's order."""
    return tuple(fewest_gathers([(action.stage,) for action in row], resident) for row in schedule.actions)


@pytest.mark.slow
def test_longer_groups_gather_less_often_within_the_memory() -> None:
    order = build("interleaved-1f1b", P, M, V)
    times = Times.equal(P * V, unshard=1, reduce_grad=1)
    assert lower(order, sharded=range(P * V), resident=RESIDENT).gathers == fewest(order, RESIDENT) == (43,) * P
    plain = simulate(lower(order, sharded=range(P * V), resident=RESIDENT), times)
    for limit, expected in ((35, 43), (64, 23), (None, 13)):
        schedule = search(times, P, M, memory_limit=limit, effort=0.02, resident=RESIDENT)
        check(schedule, memory_limit=limit, resident=RESIDENT)
        assert schedule.gathers == fewest(schedule, RESIDENT) == (expected,) * P
        assert schedule.makespan == simulate(schedule, times).makespan < plain.makespan
    least = 2 * V - RESIDENT  # a microbatch passes all stages, and all but those that stayed on its way back
    assert schedule.gathers == (least,) * P


@pytest.mark.parametrize(("chunks", "torch", "fewest"), [(4, (15, 15, 13, 13), 11), (8, (47, 47, 45, 45), 43)])
def test_torch_gathers_more_often(chunks: int, torch: tuple[int, ...], fewest: int, tmp_path: Path) -> None:
    order = build("interleaved-1f1b", P, M, chunks)
    torch_gathers = from_csv(torch_lowered(order, tmp_path)).gathers
    assert lower(order, sharded=range(order.stages), resident=RESIDENT).gathers == (fewest,) * P
    assert min(torch_gathers) > fewest
    if TORCH < (2, 15):
        assert torch_gathers == torch


def test_groups_of_more_microbatches_than_ranks() -> None:
    schedules = {schedule.name: schedule for schedule in grouped_schedules((0, 1) * 2, 4)}
    assert to_csv(schedules["interleaved-1f1b in groups of 4"]) == (
        "0F0,0F1,0F2,0F3,2F0,2F1,2F2,2B0,2F3,2B1,2B2,2B3,0B0,0B1,0B2,0B3\n"
        "1F0,1F1,1F2,1F3,3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,1B0,1B1,1B2,1B3\n"
    )
    assert list(grouped_schedules((0, 1), 4)) == list(grouped_schedules((0, 1, 1, 0), 4)) == []


@pytest.mark.parametrize("placement", ["loop", "v"])
@pytest.mark.parametrize("unshard", [0, 0.5])
def test_a_changed_order_is_no_slower_than_any_named_one(placement: str, unshard: float) -> None:
    times = Times.equal(4, unshard=unshard, reduce_grad=unshard)
    schedule = search(times, 2, 6, placement, resident=1)
    check(schedule, resident=1)
    assert (schedule.sharded, schedule.reduced) == ({0, 1, 2, 3}, {0, 1, 2, 3})
    name = {"loop": "interleaved-zb", "v": "zb-v"}[placement]
    named = lower(build(name, 2, 6), sharded=range(4), resident=1)
    assert schedule.makespan <= simulate(named, times).makespan
    assert sum(schedule.gathers) < sum(named.gathers)
    assert schedule == search(times, 2, 6, placement, resident=1)


def test_what_is_found_is_lowered_with_its_collectives() -> None:
    schedule = search(Times.equal(4), 2, 4, memory_limit=6, effort=0, resident=2)
    lowered = lower(schedule, sharded=range(4), resident=2)
    assert lowered.collectives and lowered.gathers == schedule.gathers
    assert from_csv(to_csv(schedule), "searched").collectives == schedule.collectives
    assert max(peak_activations(schedule)) <= 6


def test_without_resident_nothing_is_sharded() -> None:
    schedule = search(Times.equal(4, unshard=9), 2, 4, effort=0)
    assert (schedule.gathers, schedule.collectives) == ((0, 0), ())
    with refused(ScheduleError, "resident=0", "1 or more"):
        search(Times.equal(4), 2, 4, resident=0)
