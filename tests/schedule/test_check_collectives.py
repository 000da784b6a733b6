"""Planted faults of collectives: each is found, named, and marked in the grid."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import CollectiveKind, Schedule, build, check, from_csv, lower
from tests.messages import refused
from tests.schedule.strategies import schedules

SOUND = "0UNSHARD 0F0 1UNSHARD 1F0 1B0 1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD"


def read(text: str) -> Schedule:
    return from_csv(text.replace(" ", ","), name="one")


def test_what_the_faults_are_planted_in_is_sound() -> None:
    check(read(SOUND), resident=2)


def test_a_whole_message() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(read(SOUND.replace("0B0 0RESHARD", "0RESHARD 0B0").replace(" 0REDUCE_GRAD", "")))
    assert str(caught.value) == (
        "one: 0B0 cannot be at position 3 of rank 0: the parameters of stage 0 are sharded there.\n"
        "rank 0  0UNSHARD 0F0 1UNSHARD 1F0 1B0 1RESHARD 1REDUCE_GRAD 0RESHARD 0B0 <-- ERROR HERE\n"
        "Try: put 0UNSHARD before 0B0, or let lower() place all collectives."
    )
    assert caught.value.places == {0: 3}


@pytest.mark.parametrize(
    ("text", "parts", "advice", "position"),
    [
        ("0F0 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD", ["0F0 cannot", "sharded"], "put 0UNSHARD before 0F0", 0),
        ("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD", ["0UNSHARD", "whole"], "put 0RESHARD before it", 1),
        ("0F0 0B0 0RESHARD", ["0F0 cannot", "sharded"], "put 0UNSHARD before 0F0", 0),
        ("0RESHARD 0UNSHARD 0F0 0B0 0REDUCE_GRAD", ["0RESHARD cannot", "sharded"], "put 0UNSHARD before it", 0),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD", ["Stage 0", "whole", "end of rank 0"], "add 0RESHARD after 0B0", 2),
        ("0UNSHARD 0F0 0B0 0RESHARD", ["0REDUCE_GRAD is missing on rank 0"], "add 0REDUCE_GRAD after 0B0", 2),
        ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", ["0REDUCE_GRAD cannot", "reduced"], "remove one of the two", 2),
        ("0F0 0F1 0B0 0REDUCE_GRAD 0B1", ["0REDUCE_GRAD cannot", "0B1 adds"], "move it after 0B1", 3),
        ("0F0 0I0 0REDUCE_GRAD 0W0", ["0REDUCE_GRAD cannot", "0W0 adds"], "move it after 0W0", 2),
        ("0F0 0REDUCE_GRAD", ["0REDUCE_GRAD cannot", "without a backward"], "remove it", 1),
    ],
)
def test_planted_faults(text: str, parts: list[str], advice: str, position: int) -> None:
    with refused(ScheduleError, *parts, advice=advice) as caught:
        check(read(text))
    assert caught.value.places == {0: position}


def test_too_many_are_whole() -> None:
    with refused(
        ScheduleError, "1UNSHARD", "position 1 of rank 0", "2 stages", "resident=1", advice="resident=2"
    ) as caught:
        check(read(SOUND), resident=1)
    assert "put 0RESHARD before it" in caught.value.advice


@settings(max_examples=80, deadline=None)
@given(schedules(lowered=False), st.sampled_from((None, 2, 3)), st.data())
def test_without_any_one_collective_a_schedule_is_wrong(
    schedule: Schedule, resident: int | None, data: st.DataObject
) -> None:
    lowered = lower(schedule, sharded=range(schedule.stages), resident=resident)
    missing = data.draw(st.integers(0, len(lowered.collectives) - 1))
    remaining = tuple(collective for number, collective in enumerate(lowered.collectives) if number != missing)
    with pytest.raises(ScheduleError) as caught:
        check(lowered.changed(collectives=remaining))
    stage = lowered.collectives[missing].stage
    assert list(caught.value.places) == [schedule.placement[stage]]
    assert any(f"{stage}{kind}" in str(caught.value).splitlines()[-1] for kind in CollectiveKind)
    again = (*lowered.collectives, lowered.collectives[missing])
    with pytest.raises(ScheduleError):
        check(lowered.changed(collectives=again))


def test_lower_checks_the_collectives_that_a_schedule_has() -> None:
    with refused(ScheduleError, "0B0", "position 1 of rank 0", "sharded", advice="put 0UNSHARD before 0B0"):
        lower(read("0UNSHARD 0F0 0RESHARD 0B0 0REDUCE_GRAD"))
    with refused(ScheduleError, "resident='2'"):
        check(build("1f1b", 2, 2), resident="2")  # type: ignore[arg-type]
