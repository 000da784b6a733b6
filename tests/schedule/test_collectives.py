"""Where parameters are gathered and freed, and gradients reduced."""

from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Action, Collective, CollectiveKind, Schedule, build, check, from_csv, lower, to_csv
from tests.messages import refused
from tests.schedule.strategies import schedules
from tests.schedule.test_residency import fewest_gathers

DIVIDED = from_csv("0F0,1F0,1I0,0I0,0W0,0F1,1W0,1F1,1B1,0B1\n")


def test_where_all_stages_may_stay_each_is_gathered_and_reduced_once() -> None:
    schedule = lower(build("1f1b", 2, 2), sharded=[0, 1])
    assert to_csv(schedule) == (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0RESHARD,0REDUCE_GRAD\n"
        "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1RESHARD,1REDUCE_GRAD,1SEND_B1\n"
    )
    assert from_csv(to_csv(schedule), "1f1b") == schedule
    assert str(lower(build("gpipe", 1, 2), sharded=[0])).splitlines()[1] == (
        "rank 0  0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD"
    )


def test_with_few_resident_a_stage_is_gathered_as_soon_as_another_is_freed() -> None:
    schedule = lower(build("interleaved-1f1b", 1, 2, 3), sharded=range(3), resident=2)
    assert to_csv(schedule) == (
        "0UNSHARD,1UNSHARD,0F0,1F0,1RESHARD,2UNSHARD,2F0,2B0,2RESHARD,1UNSHARD,0F1,1B0,1F1,0B0,0RESHARD,2UNSHARD,"
        "2F1,2B1,2RESHARD,0UNSHARD,2REDUCE_GRAD,1B1,1RESHARD,1REDUCE_GRAD,0B1,0RESHARD,0REDUCE_GRAD\n"
    )


def test_gradients_are_reduced_once_though_parameters_are_freed_between_weight_gradients() -> None:
    assert to_csv(lower(DIVIDED, sharded=[0, 1], resident=1)) == (
        "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1I0,1RESHARD,0UNSHARD,0I0,0W0,0F1,0RESHARD,1UNSHARD,1W0,1F1,1B1,1RESHARD,"
        "0UNSHARD,1REDUCE_GRAD,0B1,0RESHARD,0REDUCE_GRAD\n"
    )


def test_replicated_stages_are_only_reduced() -> None:
    schedule = lower(build("zb-h1", 2, 2), sharded=[1], replicated=[0])
    assert to_csv(schedule) == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD\n"
        "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1,1RESHARD,1REDUCE_GRAD\n"
    )
    assert (schedule.sharded, schedule.reduced) == ({1}, {0, 1})


def test_a_forward_has_nothing_to_reduce() -> None:
    assert to_csv(lower(build("forward", 1, 2), sharded=[0])) == "0UNSHARD,0F0,0F1,0RESHARD\n"
    assert lower(build("forward", 2, 2), replicated=[0, 1]).collectives == ()


def test_an_overlapped_pair_has_both_its_stages_and_nothing_between() -> None:
    text = "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n"
    schedule = lower(from_csv(text), sharded=[0, 1], resident=2)
    assert to_csv(schedule) == (
        "0UNSHARD,1UNSHARD,0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,1RESHARD,1REDUCE_GRAD,0B1,0RESHARD,0REDUCE_GRAD\n"
    )
    with refused(ScheduleError, "(1F1;0B0)OVERLAP_F_B on rank 0", "2 sharded", "resident=1", advice="resident=2"):
        lower(from_csv(text), sharded=[0, 1], resident=1)
    between = Collective(1, CollectiveKind.UNSHARD, before=Action.parse("0B0"))
    assert to_csv(from_csv(text).changed(collectives=(between,))) == text.replace("(", "1UNSHARD,(")


def test_the_program_of_a_rank_has_actions_and_collectives_in_order() -> None:
    program = lower(build("gpipe", 1, 1), sharded=[0]).program(0)
    assert list(map(str, program)) == ["0UNSHARD", "0F0", "0B0", "0RESHARD", "0REDUCE_GRAD"]
    assert [type(operation) for operation in program[:2]] == [Collective, Action]
    plain = lower(build("1f1b", 2, 2))
    assert plain.program(1) == plain.actions[1]


def test_collectives_of_a_file_stay_if_they_are_of_these_stages() -> None:
    text = "0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0RESHARD,0REDUCE_GRAD\n"
    assert to_csv(lower(from_csv(text), sharded=[0], resident=1)) == text
    assert to_csv(lower(from_csv(text))) == text
    with refused(ScheduleError, "gathers", "[0]", "[]", advice="changed(collectives="):
        lower(from_csv(text), replicated=[0])
    with refused(ScheduleError, "reduces", "[0]", "[0, 1]", advice="changed(collectives="):
        lower(from_csv(text.replace("0F0", "0F0,1F0,1B0")), sharded=[0], replicated=[1])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"sharded": [2]}, ["1f1b", "stages 0 to 1", ": 2 "]),
        ({"replicated": ["0"]}, ["1f1b", "stages 0 to 1", "'0'"]),
        ({"sharded": 1}, ["Sharded and replicated", "1"]),
        ({"sharded": [0], "resident": 0}, ["resident=0", "1 or more"]),
        ({"sharded": [0], "resident": True}, ["resident=True", "1 or more"]),
    ],
)
def test_what_cannot_be_placed(arguments: dict, parts: list[str]) -> None:
    with refused(ScheduleError, *parts):
        lower(build("1f1b", 2, 2), **arguments)


@st.composite
def sharded_schedules(draw: st.DrawFn) -> tuple[Schedule, Collection[int], Collection[int], int | None]:
    """A schedule, its sharded stages, its replicated ones, and how many may be whole."""
    schedule = draw(schedules(lowered=False))
    kinds = [draw(st.sampled_from(("sharded", "sharded", "replicated", "neither"))) for _ in range(schedule.stages)]
    sharded, replicated = (
        {stage for stage, stage_kind in enumerate(kinds) if stage_kind == kind} for kind in ("sharded", "replicated")
    )
    return schedule, sharded, replicated, draw(st.sampled_from((None, 2, 3)))


@settings(max_examples=60, deadline=None)
@given(sharded_schedules())
def test_collectives_pass_the_check_and_are_written_and_read(
    sharding: tuple[Schedule, Collection[int], Collection[int], int | None],
) -> None:
    schedule, sharded, replicated, resident = sharding
    lowered = lower(schedule, sharded=sharded, replicated=replicated, resident=resident)
    check(lowered, resident=resident)
    assert lowered.actions == lower(schedule).actions
    assert from_csv(to_csv(lowered), lowered.name).collectives == lowered.collectives
    assert lowered.sharded == sharded
    assert lowered.reduced == (sharded | replicated if schedule.trains else set())
    once = tuple(sum(schedule.placement[stage] == rank for stage in sharded) for rank in range(schedule.ranks))
    gathered = lowered.gathers
    assert sum(lowered.reductions) == len(lowered.reduced)
    if resident is None:
        assert gathered == once
    elif schedule.microbatches <= 4:
        for rank in range(schedule.ranks):
            units = [{action.stage for action in unit} & sharded for unit in schedule.units(rank)]
            uses = [tuple(unit) for unit in units if unit]
            assert gathered[rank] == fewest_gathers(uses, resident)


def test_fewest_gathers_of_a_large_schedule() -> None:
    schedule = build("interleaved-1f1b", 4, 16, 8)
    assert lower(schedule, sharded=range(32), resident=3).gathers == (43,) * 4
    assert lower(schedule, sharded=range(32)).gathers == (8,) * 4
    row = schedule.actions[0]
    assert fewest_gathers([(action.stage,) for action in row], 3) == 43
