"""The CSV form, against torch's writer and reader."""

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import (
    Action,
    Collective,
    CollectiveKind,
    Schedule,
    build,
    check,
    from_csv,
    lower,
    names,
    read_csv,
    to_csv,
    without_transfers,
)
from pipegraph.schedule.recipes import trains
from tests.messages import refused
from tests.schedule.strategies import schedules
from tests.torch_version import TORCH


def torch_text(folder: Path, name: str, ranks: int, microbatches: int, with_comms: bool = False) -> str:
    """What torch's ``_dump_csv`` writes for one of its schedules."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    with open(folder / "torch.csv", "w", newline="") as file:
        csv.writer(file).writerows(get_schedule_ops(name, ranks, microbatches, with_comms=with_comms))
    return (folder / "torch.csv").read_text()


def test_one_line_per_rank() -> None:
    assert to_csv(build("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert to_csv(lower(build("forward", 2, 1))) == "0F0,0SEND_F0\n1RECV_F0,1F0\n"


def test_empty_cells_spaces_and_line_ends_mean_nothing() -> None:
    schedule = from_csv('0F0,,"0F1", 0B0,,0B1\r\n,1F0,1B0,1F1,1B1,\r\n\r\n\n', name="1f1b")
    assert schedule == build("1f1b", 2, 2)


@given(schedules())
def test_there_and_back(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule), schedule.name) == schedule


def test_skips_there_and_back() -> None:
    schedule = lower(build("gpipe", 4, 2), edges=[(0, 1), (1, 2), (2, 3), (0, 3)])
    again = from_csv(to_csv(schedule), "gpipe")
    assert again.actions == schedule.actions
    check(again)


def test_placement_and_microbatches_are_read_off_the_lines() -> None:
    schedule = from_csv("0F0,3F0\n1F0,2F0\n")
    assert (schedule.placement, schedule.microbatches, schedule.name) == ((0, 1, 1, 0), 1, "csv")


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("GPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved-1f1b"),
        ("LoopedBFS", "looped-bfs"),
        ("InterleavedZeroBubble", "interleaved-zb"),
        ("ZBVZeroBubble", "zb-v"),
        ("DualPipeV", "dualpipe-v"),
    ],
)
def test_what_torch_writes_is_ours(torch_name: str, name: str, tmp_path: Path) -> None:
    schedule = from_csv(torch_text(tmp_path, torch_name, 4, 8), name)
    assert schedule.changed(collectives=()) == build(name, 4, 8)
    if name != "gpipe":  # torch lowers only what has several stages on a rank
        lowered = from_csv(torch_text(tmp_path, torch_name, 4, 8, with_comms=True), name)
        check(lowered)
        compute = tuple(tuple(action for action in row if action.peer is None) for row in lowered.actions)
        assert (compute, lowered.overlapped) == (schedule.actions, schedule.overlapped)


@pytest.mark.parametrize("name", [name for name in names() if trains(name)])
def test_torch_reads_what_we_write_and_writes_it_back(name: str, tmp_path: Path) -> None:
    schedule = build(name, 4, 8)
    (tmp_path / "ours.csv").write_text(to_csv(schedule))
    runtime = torch_runtime(schedule)
    runtime._load_csv(tmp_path / "ours.csv")
    runtime._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    assert read_csv(tmp_path / "theirs.csv").actions == schedule.actions
    runtime._dump_csv(tmp_path / "lowered.csv", format="compute_comms")
    check(from_csv((tmp_path / "lowered.csv").read_text()))  # as torch lowers it, which also adds UNSHARD and the like


@pytest.mark.skipif(TORCH >= (2, 15), reason="torch wants a WAIT_SEND for each send")
@pytest.mark.parametrize("name", [name for name in names() if trains(name)])
def test_torch_reads_the_transfers_that_we_write(name: str, tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _simulate_comms_compute

    schedule = build(name, 4, 8)
    lowered = lower(schedule)
    (tmp_path / "ours.csv").write_text(to_csv(lowered))
    runtime = torch_runtime(schedule)
    runtime._load_csv(tmp_path / "ours.csv", format="compute_comms")
    runtime._dump_csv(tmp_path / "theirs.csv", format="compute_comms")
    assert from_csv((tmp_path / "theirs.csv").read_text(), name) == lowered
    if not schedule.overlapped:  # which torch's simulator does not know
        _simulate_comms_compute(runtime.pipeline_order_with_comms, schedule.placement.__getitem__, schedule.stages)


def test_torch_cannot_read_skips(tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _Action

    text = to_csv(lower(build("gpipe", 3, 1), edges=[(0, 2)]))
    assert "0SEND_F0>2" in text
    assert str(_Action.from_str("0SEND_F0>2")) == "0SEND_F0"


# Of torch's runtime from 2.15 on.
DEFAULTS = {
    "_unshard_lookahead": "full",
    "_max_active_stages": 3,
    "_defer_reduce_grad_wait": False,
    "_max_outstanding_sends": None,
}


def torch_runtime(schedule: Schedule) -> Any:
    """torch's runtime for schedules in files, with nothing but what its reader and writer use."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    runtime = object.__new__(_PipelineScheduleRuntime)
    sizes = {"pp_group_size": schedule.ranks, "_num_stages": schedule.stages, "_n_microbatches": schedule.microbatches}
    vars(runtime).update(sizes, _stages=[], _defer_pp_recv=False, **DEFAULTS, pipeline_order={})
    return runtime


def test_an_overlapped_pair_is_an_f_then_a_b() -> None:
    text = "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    schedule = from_csv(text, name="pair")
    forward, backward = Action.parse("1F1"), Action.parse("1B0")
    assert schedule.overlapped == {(forward, backward)}
    assert schedule.actions[1] == (Action.parse("1F0"), forward, backward, Action.parse("1B1"))
    assert to_csv(schedule) == text
    assert to_csv(replace(schedule, overlapped=frozenset())) == text.replace("(1F1;1B0)OVERLAP_F_B", "1F1,1B0")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0F0,0X1\n1F0\n", ["line 1, action 2", "'X'"]),
        ("0F0\n1F0,,what\n", ["line 2, action 3", "'what'"]),
        ("0F0\n0F1\n", ["line 2, action 1", "0F1", "line 1 holds"]),
        ("0F0\n\n1F0\n", ["line 2", "no action"]),
        ("", ["csv: ", "no action"]),
        ("\n,,\n", ["csv: ", "no action"]),
        ("0F0\n2F0\n", ["stage 1", "stage 2"]),
        ("999999999F0\n", ["stage 0", "stage 999999999"]),
        ("(0F0;0F1)OVERLAP_F_B\n", ["line 1, action 1", "'(0F0;0F1)OVERLAP_F_B'"]),
        ("(0F0;)OVERLAP_F_B\n", ["line 1, action 1", "'' is not an action"]),
    ],
)
def test_errors_name_line_and_action(text: str, parts: list[str]) -> None:
    with refused(ScheduleError, *parts):
        from_csv(text)


@given(st.text() | st.text(alphabet='0123FBWI,;()\n"_SEND<>'))
def test_any_text_is_a_schedule_or_a_schedule_error(text: str) -> None:
    try:
        schedule = from_csv(text)
        str(schedule)
        check(schedule)
    except ScheduleError:
        pass


def test_a_byte_order_mark_means_nothing() -> None:
    assert from_csv("\ufeff0F0,0B0\n") == from_csv("0F0,0B0\n")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0F0,0X1\n", ["mine.csv, line 1, action 2", "'X'"]),
        ("0F0,0B0\n1F0,1I0\n", ["1W0 is missing on rank 1", "(mine.csv, line 2)"]),
        ("0F0,,0B0\n1F0,,1B0,,1F0\n", ["1F0 cannot be on rank 1", "(mine.csv, line 2, action 5)"]),
        (
            "0F0,2F0,(0F1;0B0)OVERLAP_F_B,2F1,2B0,2B1,0B1\n1F0,1F1,1B0,1B1\n",
            ["(mine.csv, line 1, action 3 and line 2, action 2)"],
        ),
        ("0F1,2F1,0F0,2F0\n1F0,1F1\n", ["(mine.csv, line 1, action 2 and line 2, action 1)"]),
    ],
    ids=["unknown action", "missing", "twice", "pair", "cycle"],
)
def test_a_file_that_is_wrong_is_named_with_line_and_action(text: str, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with refused(ScheduleError, *parts) as caught:
        read_csv(tmp_path / "mine.csv")
    assert parts[-1] in caught.value.problem.splitlines()[0]


def test_a_file_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_bytes(b"\xef\xbb\xbf0F0,0F1,0B0,0B1,\r\n1F0,1B0,1F1,1B1\r\n")
    assert read_csv(tmp_path / "mine.csv") == replace(build("1f1b", 2, 2), name="mine")


@pytest.mark.parametrize(
    ("file", "why", "advice"),
    [
        ("absent.csv", "No such file", "the name of a file"),
        ("", "Is a directory", "the name of a file"),
        ("latin.csv", "no UTF-8", "save it as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read(file: str, why: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(b"0F0,\xe9\n")
    with refused(ScheduleError, str(tmp_path / file), why, advice=advice):
        read_csv(tmp_path / file)


def test_a_field_too_large_for_csv_is_a_schedule_error() -> None:
    with refused(ScheduleError, "csv: ", "131072"):
        from_csv("0" * 200_000)


LINES = [
    "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0RESHARD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD",
    "1RECV_F0,1UNSHARD,1F0,1B0,1RESHARD,1REDUCE_GRAD,1SEND_B0,1WAIT_SEND_B0",
]


def test_what_torch_writes_for_sharded_stages_is_kept_and_its_waits_are_not() -> None:
    schedule = from_csv("\n".join(LINES))
    assert to_csv(schedule) == (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD,0REDUCE_GRAD\n1RECV_F0,1UNSHARD,1F0,1B0,1RESHARD,1REDUCE_GRAD,1SEND_B0\n"
    )
    assert from_csv(to_csv(schedule)) == schedule
    check(schedule)
    forward = Action.parse("0F0")
    assert schedule.collectives[0] == Collective(0, CollectiveKind.UNSHARD, before=forward)


def test_collectives_stay_where_they_are_when_other_actions_go_and_come() -> None:
    text = "0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n1UNSHARD,1F0,1B0,1RESHARD,1REDUCE_GRAD\n"
    compute = from_csv("\n".join(LINES), transfers=False)
    assert to_csv(compute) == to_csv(without_transfers(from_csv("\n".join(LINES)))) == text
    assert to_csv(lower(compute)) == (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD,0REDUCE_GRAD\n1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1RESHARD,1REDUCE_GRAD\n"
    )
    pair = "0F0,0F1,0B0,0B1\n1F0,1RESHARD,(1F1;1B0)OVERLAP_F_B,1B1\n"
    assert to_csv(from_csv(pair)) == pair


def test_a_collective_that_fits_nowhere() -> None:
    with refused(ScheduleError, "line 2, action 1", "0UNSHARD", "line 1", advice="move 0UNSHARD to line 1"):
        from_csv("0F0\n0UNSHARD,1F0\n")
    schedule = build("1f1b", 2, 1)
    with refused(ScheduleError, "0RESHARD", "1F0", "rank 0"):
        schedule.changed(collectives=(Collective(0, CollectiveKind.RESHARD, Action.parse("1F0")),))
    with refused(ScheduleError, "0 to 1", "2RESHARD"):
        schedule.changed(collectives=(Collective(2, CollectiveKind.RESHARD),))


def torch_lowered(schedule: Schedule, folder: Path, deferred: bool = False) -> str:
    """What torch's runtime dumps by default: with transfers, UNSHARD, RESHARD and REDUCE_GRAD."""
    (folder / "ours.csv").write_text(to_csv(schedule))
    runtime = torch_runtime(schedule)
    runtime._defer_pp_recv = deferred
    runtime._load_csv(folder / "ours.csv")
    runtime._dump_csv(folder / "default.csv")
    return (folder / "default.csv").read_text()


@pytest.mark.parametrize("deferred", [False, True], ids=["as they are made", "deferred receives"])
@pytest.mark.parametrize("name", [name for name in names() if trains(name)])
def test_torchs_default_form_is_the_schedule_with_transfers_and_collectives(
    name: str, deferred: bool, tmp_path: Path
) -> None:
    if deferred and not hasattr(torch_schedules(), "_defer_recv_ops"):
        pytest.skip("this torch defers no receives")
    schedule = build(name, 4, 8)
    text = torch_lowered(schedule, tmp_path, deferred)
    assert "SEND_F" in text and "UNSHARD" in text
    read = read_csv(tmp_path / "default.csv", transfers=False)
    assert (read.actions, read.overlapped) == (schedule.actions, schedule.overlapped)
    assert lower(read).actions == lower(schedule).actions
    cells = [cell for line in text.splitlines() for cell in line.split(",") if not re.search("WAIT|SEND|RECV", cell)]
    assert [cell for line in to_csv(read).splitlines() for cell in line.split(",")] == [cell for cell in cells if cell]
    assert from_csv(to_csv(read), read.name) == read
    lowered = from_csv(text)
    assert from_csv(to_csv(lowered)) == lowered


def torch_schedules() -> Any:
    from torch.distributed.pipelining import schedules

    return schedules


@pytest.mark.skipif(TORCH >= (2, 15), reason="torch wants a WAIT_SEND for each send")
def test_torch_reads_the_collectives_that_we_write(tmp_path: Path) -> None:
    read = from_csv(torch_lowered(build("zb-v", 4, 8), tmp_path))
    (tmp_path / "ours.csv").write_text(to_csv(read))
    runtime = torch_runtime(read)
    runtime._load_csv(tmp_path / "ours.csv", format="compute_comms")
    runtime._dump_csv(tmp_path / "theirs.csv", format="compute_comms")
    assert from_csv((tmp_path / "theirs.csv").read_text()) == read
