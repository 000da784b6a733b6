"""Planted faults of collectives: each is found, named, and marked in the grid."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import CollectiveKind, Schedule, build, check, from_csv, lower
from tests.schedule.strategies import schedules

SOUND = "0UNSHARD 0F0 1UNSHARD 1F0 1B0 1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD"


def refused(text: str, resident: int | None = None) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        check(read(text), resident=resident)
    return caught.value


def read(text: str) -> Schedule:
    return from_csv(text.replace(" ", ","), name="one")


def test_what_the_faults_are_planted_in_is_sound() -> None:
    check(read(SOUND), resident=2)


def test_a_whole_message() -> None:
    error = refused(SOUND.replace("0B0 0RESHARD", "0RESHARD 0B0").replace(" 0REDUCE_GRAD", ""))
    assert str(error) == (
        "one: 0B0 cannot be at position 3 of rank 0: the parameters of stage 0 are sharded there.\n"
        "rank 0  0UNSHARD 0F0 1UNSHARD 1F0 1B0 1RESHARD 1REDUCE_GRAD 0RESHARD 0B0 <-- ERROR HERE\n"
        "Try: put 0UNSHARD before 0B0, or let lower() place all collectives."
    )
    assert error.places == {0: 3}


@pytest.mark.parametrize(
    ("text", "what", "advice", "position"),
    [
        ("0F0 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD", "0F0 .* are sharded there", "put 0UNSHARD before 0F0", 0),
        ("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD", "0UNSHARD .* whole already", "put 0RESHARD before it", 1),
        ("0F0 0B0 0RESHARD", "0F0 .* are sharded there", "put 0UNSHARD before 0F0", 0),
        ("0RESHARD 0UNSHARD 0F0 0B0 0REDUCE_GRAD", "0RESHARD .* sharded already", "put 0UNSHARD before it", 0),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD", "Stage 0 is still whole at the end of rank 0", "add 0RESHARD after 0B0", 2),
        ("0UNSHARD 0F0 0B0 0RESHARD", "0REDUCE_GRAD is missing on rank 0", "add 0REDUCE_GRAD after 0B0", 2),
        ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "0REDUCE_GRAD .* reduced before it", "remove one of the two", 2),
        ("0F0 0F1 0B0 0REDUCE_GRAD 0B1", "0REDUCE_GRAD .* 0B1 adds to these", "move it after 0B1", 3),
        ("0F0 0I0 0REDUCE_GRAD 0W0", "0REDUCE_GRAD .* 0W0 adds to these", "move it after 0W0", 2),
        ("0F0 0REDUCE_GRAD", "0REDUCE_GRAD .* without a backward has no gradients", "remove it", 1),
    ],
)
def test_planted_faults(text: str, what: str, advice: str, position: int) -> None:
    error = refused(text)
    with pytest.raises(ScheduleError, match=what):
        raise error
    assert advice in str(error)
    assert error.places == {0: position}


def test_too_many_are_whole() -> None:
    error = refused(SOUND, resident=1)
    assert "1UNSHARD cannot be at position 1 of rank 0: with it, 2 stages are whole, and resident=1." in str(error)
    assert str(error).endswith("put 0RESHARD before it, or give resident=2.")


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
    with pytest.raises(ScheduleError, match="are sharded there"):
        lower(read("0UNSHARD 0F0 0RESHARD 0B0 0REDUCE_GRAD"))
    with pytest.raises(ScheduleError, match=r"resident='2' stages"):
        check(build("1f1b", 2, 2), resident="2")  # type: ignore[arg-type]
