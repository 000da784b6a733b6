"""The named schedules: their grids, their formulas, and torch's own generators."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import build, check, names, peak_activations

GRIDS = {
    ("gpipe", 3, 3): """\
gpipe: 3 ranks, 3 stages, 3 microbatches
rank 0  0F0 0F1 0F2                 0B0 0B1 0B2
rank 1      1F0 1F1 1F2         1B0 1B1 1B2
rank 2          2F0 2F1 2F2 2B0 2B1 2B2""",
    ("gpipe", 1, 2): """\
gpipe: 1 ranks, 1 stages, 2 microbatches
rank 0  0F0 0F1 0B0 0B1""",
    ("1f1b", 3, 4): """\
1f1b: 3 ranks, 3 stages, 4 microbatches
rank 0  0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3
rank 1      1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3
rank 2          2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
    ("1f1b", 4, 1): """\
1f1b: 4 ranks, 4 stages, 1 microbatches
rank 0  0F0                         0B0
rank 1      1F0                 1B0
rank 2          2F0         2B0
rank 3              3F0 3B0""",
    ("forward", 3, 2): """\
forward: 3 ranks, 3 stages, 2 microbatches
rank 0  0F0 0F1
rank 1      1F0 1F1
rank 2          2F0 2F1""",
}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), GRIDS)
def test_grid(name: str, ranks: int, microbatches: int) -> None:
    assert str(build(name, ranks, microbatches)) == GRIDS[name, ranks, microbatches]


@given(st.sampled_from(names()), st.integers(1, 9), st.integers(1, 20))
def test_every_number_of_ranks_and_microbatches_builds(name: str, ranks: int, microbatches: int) -> None:
    schedule = build(name, ranks, microbatches)
    check(schedule)
    assert schedule.placement == tuple(range(ranks))
    assert schedule.has_backward is (name != "forward")
    assert not schedule.lowered
    expected = {
        "gpipe": [microbatches] * ranks,
        "1f1b": [min(microbatches, ranks - rank) for rank in range(ranks)],
        "forward": [0] * ranks,
    }
    assert list(peak_activations(schedule)) == expected[name]


@pytest.mark.parametrize(("name", "torch_name"), [("gpipe", "GPipe"), ("1f1b", "1F1B")])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_torch_builds_the_same(name: str, torch_name: str, ranks: int) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for microbatches in (ranks, ranks + 1, 2 * ranks + 3):  # torch's 1F1B refuses fewer microbatches than ranks
        theirs = [
            [str(action) for action in row if action is not None and "REDUCE_GRAD" not in str(action)]
            for row in get_schedule_ops(torch_name, ranks, microbatches)
        ]
        if torch_name == "1F1B":  # whose last rank numbers its forwards from 1
            forward = f"{ranks - 1}F"
            theirs[-1] = [
                f"{forward}{int(action.removeprefix(forward)) - 1}" if action.startswith(forward) else action
                for action in theirs[-1]
            ]
        assert [[str(action) for action in row] for row in build(name, ranks, microbatches).actions] == theirs


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("GPipe", "gpipe"),
        ("ScheduleGPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("schedule1f1b", "1f1b"),
        ("Forward", "forward"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert build(alias, 2, 3) == build(name, 2, 3)


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(ScheduleError) as caught:
        build("1f1c", 2, 2)
    message = 'There is no schedule "1f1c". Did you mean "1f1b"? The schedules are gpipe, 1f1b, forward.'
    assert str(caught.value) == message


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", None, True])
def test_ranks_and_microbatches_are_whole_numbers_from_one(number: object) -> None:
    with pytest.raises(ScheduleError, match="ranks: give a whole number from 1 on"):
        build("gpipe", number, 2)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="microbatches: give a whole number from 1 on"):
        build("gpipe", 2, number)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "forward"])
def test_a_rank_holds_one_stage(name: str) -> None:
    assert build(name, 2, 2, chunks=1) == build(name, 2, 2)
    with pytest.raises(ScheduleError, match=f"{name} cannot have 2 chunks: a rank holds 1 in it"):
        build(name, 2, 2, chunks=2)
