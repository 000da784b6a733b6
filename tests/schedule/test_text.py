"""The CSV form, against torch's writer and reader."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Action, build, check, from_csv, lower, names, to_csv


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


@given(st.sampled_from(names()), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_there_and_back(name: str, ranks: int, microbatches: int, lowered: bool) -> None:
    schedule = build(name, ranks, microbatches)
    schedule = lower(schedule) if lowered else schedule
    assert from_csv(to_csv(schedule), name) == schedule


def test_skips_there_and_back() -> None:
    schedule = lower(build("gpipe", 4, 2), edges=[(0, 1), (1, 2), (2, 3), (0, 3)])
    again = from_csv(to_csv(schedule), "gpipe")
    assert again.actions == schedule.actions
    check(again)


def test_placement_and_microbatches_are_read_off_the_lines() -> None:
    schedule = from_csv("0F0,3F0\n1F0,2F0\n")
    assert (schedule.placement, schedule.microbatches, schedule.name) == ((0, 1, 1, 0), 1, "csv")


@pytest.mark.parametrize(
    "name", ["GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_what_torch_writes_is_read_and_sound(name: str, tmp_path: Path) -> None:
    schedule = from_csv(torch_text(tmp_path, name, 4, 8), name)
    check(schedule)
    check(lower(schedule))
    assert (schedule.ranks, schedule.microbatches) == (4, 8)
    assert bool(schedule.overlapped) is (name == "DualPipeV")
    assert from_csv(to_csv(schedule), name) == schedule
    if name != "GPipe":  # torch lowers only what has several stages on a rank
        check(from_csv(torch_text(tmp_path, name, 4, 8, with_comms=True), name))


def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _Action

    schedule = lower(from_csv(torch_text(tmp_path, "DualPipeV", 2, 4), "DualPipeV"))
    for order, line in zip(schedule.actions, csv.reader(to_csv(schedule).splitlines()), strict=True):
        assert [str(_Action.from_str(cell)) for cell in line] == line
        assert [str(action) for action in order] == ",".join(line).replace(")OVERLAP_F_B", "").replace("(", "").replace(
            ";", ","
        ).split(",")


def test_an_overlapped_pair_is_an_f_then_a_b() -> None:
    text = "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    schedule = from_csv(text, name="pair")
    forward, backward = Action.parse("1F1"), Action.parse("1B0")
    assert schedule.overlapped == {(forward, backward)}
    assert schedule.actions[1] == (Action.parse("1F0"), forward, backward, Action.parse("1B1"))
    assert to_csv(schedule) == text
    assert to_csv(replace(schedule, overlapped=frozenset())) == text.replace("(1F1;1B0)OVERLAP_F_B", "1F1,1B0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X1\n1F0\n", "csv, line 1, action 2: There is no action of the kind 'X'."),
        ("0F0\n1F0,,what\n", "csv, line 2, action 3: 'what' is no action."),
        ("0F0\n0F1\n", "csv, line 2, action 1: 0F1 is of stage 0, which line 1 holds."),
        ("0F0\n\n1F0\n", "csv, line 2: no action stands here."),
        ("", "csv: there is no action. A schedule has a line per rank"),
        ("\n,,\n", "csv: there is no action."),
        ("0F0\n2F0\n", "csv: stage 1 has no action, but stage 2 has."),
        ("999999999F0\n", "csv: stage 0 has no action, but stage 999999999 has."),
        ("(0F0;0F1)OVERLAP_F_B\n", "line 1, action 1: '(0F0;0F1)OVERLAP_F_B' is no overlapped pair"),
        ("(0F0;)OVERLAP_F_B\n", "line 1, action 1: '' is no action"),
    ],
)
def test_errors_name_line_and_action(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_csv(text)
    assert message in str(caught.value)


@given(st.text() | st.text(alphabet='0123FBWI,;()\n"_SEND<>'))
def test_any_text_is_a_schedule_or_a_schedule_error(text: str) -> None:
    try:
        schedule = from_csv(text)
        str(schedule)
        check(schedule)
    except ScheduleError:
        pass


def test_a_field_too_large_for_csv_is_a_schedule_error() -> None:
    with pytest.raises(ScheduleError, match="This is no CSV"):
        from_csv("0" * 200_000)


def test_what_torch_writes_for_others_is_left_out() -> None:
    first = "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD"
    second = "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0"
    assert to_csv(from_csv(f"{first}\n{second}\n")) == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
