"""The named schedules: which there are, which numbers they take, and what they hold."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Kind, build, check, names, peak_activations
from pipegraph.schedule.recipes import compared_names
from tests.messages import refused

NAMES = (
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
    "forward",
)
ANY_CHUNKS = ("interleaved-1f1b", "looped-bfs", "interleaved-zb")
GROUPS_OF_RANKS = ("interleaved-1f1b", "interleaved-zb")
IN_A_V = ("zb-v", "v-half", "v-min", "dualpipe-v")
DIVIDED = ("zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min")


def fitting(name: str, ranks: int, microbatches: int) -> int:
    """The nearest number of microbatches from this on that the schedule takes."""
    if name in GROUPS_OF_RANKS:
        return -(-microbatches // ranks) * ranks
    if name in IN_A_V:
        return max(microbatches, 2 * ranks - (name != "dualpipe-v"))
    return microbatches


def test_the_names() -> None:
    assert names() == NAMES


@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 24), st.integers(1, 4))
def test_all_ranks_and_fitting_microbatches_and_chunks_build(
    name: str, ranks: int, microbatches: int, chunks: int
) -> None:
    microbatches = fitting(name, ranks, microbatches)
    chunks = chunks if name in ANY_CHUNKS else 2 if name in IN_A_V else 1
    schedule = build(name, ranks, microbatches, chunks)
    check(schedule, memory_limit=max(peak_activations(schedule)))
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (ranks, ranks * chunks, microbatches)
    if name in IN_A_V:
        assert schedule.placement == (*range(ranks), *range(ranks - 1, -1, -1))
    else:
        assert schedule.placement == tuple(stage % ranks for stage in range(ranks * chunks))
    kinds = {action.kind for row in schedule.actions for action in row}
    if name in DIVIDED:
        assert kinds == {Kind.F, Kind.I, Kind.W}
    elif name == "forward":
        assert kinds == {Kind.F}
    elif name == "dualpipe-v":
        assert kinds == {Kind.F, Kind.B, Kind.I, Kind.W}
    else:
        assert kinds == {Kind.F, Kind.B}
    assert bool(schedule.overlapped) is (name == "dualpipe-v")
    assert not schedule.lowered


# Of (ranks p, microbatches m, chunks v, rank r): the most activations of one stage that the rank holds.
MEMORY: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda p, m, v, r: m,
    "1f1b": lambda p, m, v, r: min(m, p - r),
    "eager-1f1b": lambda p, m, v, r: min(m, 2 * (p - 1 - r) + 1),
    "interleaved-1f1b": lambda p, m, v, r: min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1),
    "looped-bfs": lambda p, m, v, r: m * v,
    "zb-h1": lambda p, m, v, r: min(m, p),
    "zb-h2": lambda p, m, v, r: min(m, 2 * p - 1),
    "interleaved-zb": lambda p, m, v, r: p * v,
    "zb-v": lambda p, m, v, r: 2 * p,
    "dualpipe-v": lambda p, m, v, r: 2 * p + 1,
    "forward": lambda p, m, v, r: 0,
}


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_what_each_rank_holds(name: str, ranks: int) -> None:
    for chunks in (1, 2, 3) if name in ANY_CHUNKS else (None,):
        for microbatches in {fitting(name, ranks, number) for number in (1, 2, ranks, 2 * ranks - 1, 3 * ranks + 1)}:
            schedule = build(name, ranks, microbatches, chunks)
            expected = [MEMORY[name](ranks, microbatches, chunks or 1, rank) for rank in range(ranks)]
            assert list(peak_activations(schedule)) == expected


@pytest.mark.parametrize("ranks", range(1, 14))
def test_what_the_schedules_with_controllable_memory_hold(ranks: int) -> None:
    """Each activation is one of a rank's two stages, so that the published figures stand twice."""
    for microbatches in (2 * ranks - 1, 2 * ranks, 4 * ranks + 1):
        assert max(peak_activations(build("v-half", ranks, microbatches))) == 2 * ((ranks + 2) // 2)
        assert max(peak_activations(build("v-min", ranks, microbatches))) == 2 * ((ranks + 4) // 3)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved-1f1b"),
        ("LoopedBFS", "looped-bfs"),
        ("InterleavedZeroBubble", "interleaved-zb"),
        ("ZBVZeroBubble", "zb-v"),
        ("DualPipeV", "dualpipe-v"),
    ],
)
def test_torch_names(alias: str, name: str) -> None:
    for spelled in (alias, f"Schedule{alias}", f"schedule{alias}".lower(), name.upper()):
        assert build(spelled, 2, 4) == build(name, 2, 4)


def test_torch_has_no_other_schedules() -> None:
    from torch.distributed.pipelining import schedules

    bases = {"ScheduleGPipe", "Schedule1F1B"}
    class_names = {name for name in vars(schedules) if name.startswith("Schedule")}
    assert bases < class_names
    for name in class_names:
        build(name, 2, 4)


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    with refused(ScheduleError, '"zbv"', '"zb-v"', ", ".join(NAMES), advice="zb-v"):
        build("zbv", 2, 2)


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", None, True])
def test_ranks_and_microbatches_are_whole_numbers_from_one(number: object) -> None:
    with refused(ScheduleError, "gpipe", f"{number!r} ranks", advice="whole number"):
        build("gpipe", number, 2)  # type: ignore[arg-type]
    with refused(ScheduleError, "gpipe", f"{number!r} microbatches", advice="whole number"):
        build("gpipe", 2, number)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_how_many_chunks_a_rank_holds(name: str) -> None:
    usual = 2 if name in (*ANY_CHUNKS, *IN_A_V) else 1
    assert build(name, 2, 4, chunks=usual) == build(name, 2, 4)
    if name in ANY_CHUNKS:
        assert build(name, 2, 4, chunks=3).stages == 6
        return
    with refused(ScheduleError, name, "3 chunks", f"holds {usual}", advice=f"chunks={usual}"):
        build(name, 2, 4, chunks=3)


def test_one_chunk_makes_the_plain_schedule() -> None:
    assert build("interleaved-1f1b", 3, 6, chunks=1).actions == build("eager-1f1b", 3, 6).actions
    assert build("interleaved-zb", 3, 6, chunks=1).actions == build("zb-h1", 3, 6).actions


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "advice"),
    [
        ("interleaved-1f1b", 4, 10, "8 or 12 microbatches, or 2 or 5 ranks."),
        ("interleaved-1f1b", 4, 3, "4 microbatches, or 3 ranks."),
        ("interleaved-1f1b", 3, 1, "3 microbatches, or 1 rank."),
        ("interleaved-zb", 6, 16, "12 or 18 microbatches, or 4 or 8 ranks."),
        ("interleaved-zb", 5, 7, "5 or 10 microbatches, or 1 or 7 ranks."),
        ("zb-v", 4, 6, "7 microbatches, or 3 ranks or fewer."),
        ("v-half", 2, 2, "3 microbatches, or 1 rank."),
        ("v-min", 2, 1, "3 microbatches, or 1 rank."),
        ("dualpipe-v", 3, 5, "6 microbatches, or 2 ranks or fewer."),
        ("dualpipe-v", 1, 1, "2 microbatches."),
    ],
)
def test_counts_that_a_schedule_cannot_take(name: str, ranks: int, microbatches: int, advice: str) -> None:
    with refused(ScheduleError, name, f"{microbatches} microbatch", f"{ranks} rank", advice=advice):
        build(name, ranks, microbatches)


@given(st.sampled_from((*GROUPS_OF_RANKS, *IN_A_V)), st.integers(1, 9), st.integers(1, 30))
def test_what_is_refused_and_what_is_advised_instead(name: str, ranks: int, microbatches: int) -> None:
    """Every number that the message names does."""
    if fitting(name, ranks, microbatches) == microbatches:
        build(name, ranks, microbatches)
        return
    with pytest.raises(ScheduleError) as caught:
        build(name, ranks, microbatches)
    assert caught.value.advice
    of_microbatches, _, of_ranks = caught.value.advice.partition(", or ")
    for number in (int(word) for word in of_microbatches.split() if word.isdigit()):
        build(name, ranks, number)
    for number in (int(word) for word in of_ranks.split() if word.isdigit()):
        build(name, number, microbatches)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_more_microbatches_than_a_step_can_have_are_refused_at_once(name: str) -> None:
    stages = 4 if name == "1f1b" else 8
    with refused(ScheduleError, name, "10,000,000 ", f"{stages} stages", advice=f"{2_000_000 // stages:,} "):
        build(name, 4, 10**7)


def test_plans_for_a_cluster_compare_these() -> None:
    assert compared_names() == ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v")
