"""``pipegraph schedule``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipegraph.schedule import Times, build, from_csv, join_backwards
from tests.cli.command import ROOT, Command

TIMES = {
    "forward": [0.010, 0.020, 0.010],
    "input_grad": [0.010, 0.020, 0.010],
    "weight_grad": [0.005, 0.010, 0.005],
    "hop": 0.001,
}
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLORTERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def times(tmp_path: Path) -> Path:
    file = tmp_path / "times.json"
    file.write_text(json.dumps(TIMES))
    return file


def test_a_schedule_is_drawn_and_measured(pipegraph: Command) -> None:
    done = pipegraph("schedule", "1f1b", "--ranks", 3, "--microbatches", 4)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "1f1b: 3 ranks, 3 stages, 4 microbatches",
        "time    0                   5                   10                  15",
        "rank 0  0F0 0F1 0F2                 0B0──── 0F3 0B1────     0B2────     0B3────",
        "rank 1      1F0 1F1         1B0──── 1F2 1B1──── 1F3 1B2────     1B3────",
        "rank 2          2F0 2B0──── 2F1 2B1──── 2F2 2B2──── 2F3 2B3────",
        "",
        "makespan          18   bubble 33.3 %",
        "lower bound       14   makespan 28.6 % above it",
        "peak activations  3, 2, 1",
        "critical path     0F0 → 2F0 → 2B3 → 0B3: rank 2 67 %, rank 0 17 %, rank 1 17 %",
    ]


def test_boxes_are_as_wide_as_their_times(pipegraph: Command, times: Path) -> None:
    done = pipegraph("schedule", "zb-h1", "--ranks", 3, "--microbatches", 2, "--times", times, "--memory-limit", 3)
    assert done.code == 0, done
    assert done.out.splitlines()[1:5] == [
        "ms      0               20              40              60              80              100",
        "rank 0  0F0──── 0F1────                                            0I0──── 0W0     0I1──── 0W1",
        "rank 1           1F0──────────── 1F1────────────  1I0──────────── 1I1──────────── 1W0──── 1W1────",
        "rank 2                            2F0──── 2I0──── 2F1──── 2I1──── 2W0 2W1",
    ]
    assert "peak activations  2 on every rank (limit 3)" in done.out


def test_stages_of_one_rank(pipegraph: Command) -> None:
    done = pipegraph("schedule", "interleaved-1f1b", "--ranks", 2, "--microbatches", 2, "--chunks", 3)
    title, _, first, *_ = done.out.splitlines()
    assert title == "interleaved-1f1b: 2 ranks, 6 stages, 2 microbatches"
    assert first.startswith("rank 0  0F0 0F1 2F0 2F1 4F0 4F1")


def test_one_of_each(pipegraph: Command) -> None:
    done = pipegraph("schedule", "forward", "--ranks", 1, "--microbatches", 1)
    assert done.out.splitlines()[0] == "forward: 1 rank, 1 stage, 1 microbatch"
    assert "lower bound       1   reached" in done.out


def test_files(pipegraph: Command, tmp_path: Path, times: Path) -> None:
    svg, csv = tmp_path / "picture.svg", tmp_path / "order.csv"
    csv.write_text("an older file")
    command = ["schedule", "zb-v", "--ranks", 2, "--microbatches", 4]
    assert pipegraph(*command, "--svg", svg, "--csv", csv).code == 0
    assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert from_csv(csv.read_text()).actions == build("zb-v", 2, 4).actions
    assert sorted(tmp_path.iterdir()) == [csv, svg, times]
    again = pipegraph("schedule", csv).out.splitlines()
    assert again[0] == "order: 2 ranks, 4 stages, 4 microbatches"
    assert again[1:] == pipegraph(*command).out.splitlines()[1:]


def test_a_link_is_written_through(pipegraph: Command, tmp_path: Path) -> None:
    file, link = tmp_path / "order.csv", tmp_path / "link.csv"
    link.symlink_to(file)
    assert pipegraph("schedule", "gpipe", "--ranks", 1, "--microbatches", 1, "--csv", link).code == 0
    assert (link.is_symlink(), file.read_text()) == (True, "0F0,0B0\n")


def test_a_drawing_replaces_a_drawing_and_nothing_else(pipegraph: Command, tmp_path: Path) -> None:
    source, drawing = tmp_path / "model.py", tmp_path / "order.svg"
    source.write_text("model = None\n")
    command = ["schedule", "gpipe", "--ranks", 1, "--microbatches", 1]
    for option in ("--svg", "--csv"):
        result = pipegraph(*command, "--svg", drawing, option, source)
        assert (result.code, source.read_text()) == (2, "model = None\n")
        assert "model.py exists already" in result.err and f"Try: {tmp_path / 'model'}" in result.err
        assert option == "--svg" or not drawing.exists()  # nothing is written before all can be
    assert [pipegraph(*command, "--svg", drawing).code for _ in range(2)] == [0, 0]


def test_json(pipegraph: Command, times: Path) -> None:
    done = pipegraph("schedule", "1f1b", "--ranks", 3, "--microbatches", 2, "--times", times, "--json")
    result = json.loads(done.out)
    assert list(result) == [
        *("schema_version", "name", "ranks", "stages", "chunks", "microbatches", "placement", "times", "makespan"),
        *("span", "bubble", "span_bubble", "lower_bound", "peak_activations", "memory_limit", "busy", "critical_path"),
        *("actions", "events"),
    ]
    assert result["schema_version"] == 1
    assert result["times"] == {**TIMES, "transfer": 0.0, "unshard": 0.0, "reduce_grad": 0.0}
    assert result["makespan"] == pytest.approx(0.134)
    assert result["bubble"] == pytest.approx(1 - 0.2 / 3 / 0.134)
    assert (result["placement"], result["peak_activations"]) == ([0, 1, 2], [2, 2, 1])
    assert result["actions"][2] == ["2F0", "2B0", "2F1", "2B1"]
    assert [event["action"] for event in result["events"][2]] == result["actions"][2]
    assert result["events"][0][0] == {"action": "0F0", "start": 0.0, "end": 0.01}
    assert result["critical_path"][0] == "0F0"


def test_sharded_stages(pipegraph: Command, tmp_path: Path) -> None:
    csv, command = tmp_path / "mine.csv", ["schedule", "gpipe", "--ranks", 1, "--microbatches", 2]
    assert pipegraph(*command, "--sharded", "--csv", csv).out.splitlines()[1:] == [
        "time    0                   5",
        "rank 0      0F0 0F1 0B0──── 0B1────",
        "        0U─                         0R─",
        "",
        "makespan          8   bubble 25.0 %",
        "lower bound       6   makespan 33.3 % above it",
        "peak activations  2",
        "gathers           1; a rank waits 1 for them at most",
        "reductions        1",
        "whole stages      at most 1",
        "critical path     0F0 → 0B1: rank 0 75 %, collectives 25 %",
    ]
    assert csv.read_text() == "0UNSHARD,0F0,0F1,0B0,0B1,0RESHARD,0REDUCE_GRAD\n"
    assert "gathers           1; " in pipegraph("schedule", csv, "--resident", 1).out
    result = json.loads(pipegraph(*command, "--resident", 1, "--json").out)
    assert [result[name] for name in ("gathers", "reductions", "gather_waits", "peak_whole")] == [[1]] * 4
    assert result["programs"] == [csv.read_text().strip().split(",")]
    assert result["collectives"][0][0] == {"collective": "0UNSHARD", "start": 0, "end": 1}
    sizes = ["--ranks", 2, "--microbatches", 4, "--chunks", 3, "--effort", 0.1]
    few, all_stay = (
        json.loads(pipegraph("schedule", "search", *sizes, *option, "--json").out)
        for option in (("--resident", 2), ("--sharded",))
    )
    assert (few["gathers"], all_stay["gathers"]) == ([4, 4], [3, 3])


def test_search(pipegraph: Command, times: Path) -> None:
    sizes = ["--ranks", 3, "--microbatches", 4, "--times", times, "--memory-limit", 3]
    searched = json.loads(pipegraph("schedule", "search", *sizes, "--json").out)
    assert searched["makespan"] >= searched["lower_bound"]
    assert max(searched["peak_activations"]) <= 3 == searched["memory_limit"]
    for name in ("1f1b", "zb-h1"):
        assert searched["makespan"] <= json.loads(pipegraph("schedule", name, *sizes, "--json").out)["makespan"]
    folded = pipegraph("schedule", "search", "--ranks", 2, "--microbatches", 3, "--placement", "v")
    assert folded.out.splitlines()[0].endswith(": 2 ranks, 4 stages, 3 microbatches")
    assert "found from" in folded.out


def test_a_lowered_file_is_drawn_without_its_transfers(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / "lowered.csv"
    file.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert pipegraph("schedule", file).out.splitlines()[2:4] == [
        "rank 0  0F0             0B0────",
        "rank 1      1F0 1B0────",
    ]


def test_forced_colour(pipegraph: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["schedule", "1f1b", "--ranks", 2, "--microbatches", 2]
    without = pipegraph(*command).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = pipegraph(*command).out
    assert [ESCAPES.sub("", line).rstrip() for line in coloured.splitlines()[:6]] == [
        "1f1b: 2 ranks, 2 stages, 2 microbatches",
        "time    0         5",
        "rank 0   0 1     0     1",
        "rank 1     0 0   1 1",
        "",
        " F  forward    B  backward (I and W)   0 critical path",
    ]
    assert "\x1b[" in coloured and "\x1b[" not in without
    monkeypatch.setenv("NO_COLOR", "1")
    assert pipegraph(*command).out == without


@pytest.mark.parametrize("variable", ["", "NO_COLOR"])
def test_a_terminal_gets_lines_of_its_width(variable: str) -> None:
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "60"} | ({variable: "1"} if variable else {})
    command = [sys.executable, "-m", "pipegraph", "schedule", "zb-h1", "--ranks", "3", "--microbatches", "12"]
    done = subprocess.Popen(command, stdout=terminal, cwd=ROOT, env=environment)
    os.close(terminal)
    read = b""
    try:
        while part := os.read(controller, 65536):
            read += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(controller)
    assert done.wait(60) == 0
    lines = read.decode().splitlines()
    assert any("\x1b[" in line for line in lines) is (variable == "")
    ranks = [ESCAPES.sub("", line) for line in lines if ESCAPES.sub("", line).startswith("rank 2")]
    assert len(ranks) > 1
    assert max(map(len, ranks)) <= 60


SIZES = ("--ranks", 4, "--microbatches", 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f1c", *SIZES), 'Did you mean "1f1b"?'),
        (("zb-v", "--ranks", 4, "--microbatches", 5), "7"),
        (("interleaved-1f1b", "--ranks", 4, "--microbatches", 6), "8"),
        (("1f1b", "--ranks", 4), "1f1b lacks --microbatches"),
        (("search",), "search lacks --ranks and --microbatches"),
        (("1f1b", "--ranks", 0, "--microbatches", 1), "--ranks"),
        (("1f1b", *SIZES, "--placement", "w"), "neither loop nor v"),
        (("zb-v", *SIZES, "--placement", "loop"), "leave --placement out"),
        (("zb-v", *SIZES, "--chunks", 3), "3 chunks"),
        (("1f1b", *SIZES, "--memory-limit", 3), "raise the limit of 3"),
        (("search", *SIZES, "--placement", "v", "--memory-limit", 1), "Try: 2 or more"),
        (("dualpipe-v", "--ranks", 2, "--microbatches", 4, "--resident", 1), "Try: resident=2"),
        (("1f1b", *SIZES, "--resident", 0), "--resident"),
        (("nowhere.csv",), "the schedule nowhere.csv cannot be read: No such file or directory"),
        (("1f1b", *SIZES, "--times", "nowhere.json"), "the times nowhere.json cannot be read: No such file"),
        (("1f1b", *SIZES, "--svg", "nowhere/a.svg"), "there is no folder nowhere"),
        (("1f1b", *SIZES, "--csv", "tests"), "tests cannot be written: it is not a regular file"),
        (("1f1b", *SIZES, "--csv", "-"), "- cannot be written"),
        (("1f1b", *SIZES, "--csv", "/dev/stdout"), "/dev/stdout cannot be written"),
    ],
)
def test_wrong_arguments(pipegraph: Command, arguments: tuple[object, ...], said: str) -> None:
    done = pipegraph("schedule", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"forward": [1, 1], "input', "no JSON"),
        ('{"forward": [1, 1], "input_grad": [1, 1]}', 'lack "weight_grad"'),
        ('{"forward": [1, 1], "input_grad": [1, 1], "weight_grad": [1]}', "weight_grad has 1"),
        ('{"forward": [1, -1], "input_grad": [1, 1], "weight_grad": [1, 1]}', "-1"),
        ('{"forward": [1, 1], "input_grad": [1, 1], "weight_grad": [1, 1], "hop": [1, 1]}', "hop"),
        (
            '{"forward": [1, 1, 1], "input_grad": [1, 1, 1], "weight_grad": [1, 1, 1]}',
            "the times are for 3",
        ),
    ],
)
def test_wrong_times(pipegraph: Command, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "times.json"
    file.write_text(text)
    done = pipegraph("schedule", "1f1b", "--ranks", 2, "--microbatches", 2, "--times", file)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_sizes_that_are_not_the_files(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    for size, number in (("--ranks", 3), ("--microbatches", 2), ("--chunks", 2)):
        done = pipegraph("schedule", file, size, number)
        assert done.code == 2 and f"{size} {number} was given" in done.err
    assert pipegraph("schedule", file, "--ranks", 2, "--microbatches", 1, "--chunks", 1).code == 0


def test_a_file_that_cannot_run_is_not_drawn(pipegraph: Command, tmp_path: Path) -> None:
    file, svg = tmp_path / "order.csv", tmp_path / "picture.svg"
    file.write_text("0F0,0B0\n1B0,1F0\n")
    done = pipegraph("schedule", file, "--svg", svg)
    assert (done.code, done.out) == (2, "")
    assert "1B0" in done.err and "line 2" in done.err
    assert not svg.exists()


def test_backwards_are_joined_where_nothing_waits_for_that(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    command = "schedule", "zb-v", "--ranks", 2, "--microbatches", 4, "--join-backwards", "--csv", file
    assert "zb-v, joined: 2 ranks, 4 stages, 4 microbatches" in pipegraph(*command).out
    assert from_csv(file.read_text()).actions == join_backwards(build("zb-v", 2, 4), Times.equal(4)).actions
    assert pipegraph(*command, "--sharded").code == 0
    refused = pipegraph("schedule", file, "--join-backwards")
    assert refused.code == 2 and "Try: without --join-backwards" in refused.err
