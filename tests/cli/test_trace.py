"""``pipegraph trace merge`` and ``report``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipegraph.schedule import Times, build
from tests.cli.command import Command
from tests.tracing.chrome import read_strictly
from tests.tracing.recordings import DIGITS, Event, manifest, rows_of, write_run
from tests.tracing.test_idle_causes import EVEN, FAR, SCHEDULE, SLOW_HOST, UNEVEN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "run", SCHEDULE, {3: FAR}, manifest(2))


def test_merge_writes_a_trace_and_says_how_well_clocks_agree(pipegraph: Command, folder: Path, tmp_path: Path) -> None:
    result = pipegraph("trace", "merge", folder.parent, "-o", tmp_path / "trace.json.gz")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"wrote {tmp_path / 'trace.json.gz'}: 16 slices, 4 messages")
    assert "rank 1: stage 1" in result.out and "± 2 µs" in result.out
    read_strictly(tmp_path / "trace.json.gz")


def test_merge_as_json(pipegraph: Command, folder: Path, tmp_path: Path) -> None:
    result = pipegraph("trace", "merge", folder, "-o", tmp_path / "trace.json", "--json")
    summary = json.loads(result.out)
    assert (summary["schema_version"], summary["slices"], summary["flows"], summary["problems"]) == (1, 16, 4, [])
    assert summary["clocks"][1]["error"] == pytest.approx(2e-6)


def test_merge_replaces_no_file_unasked(pipegraph: Command, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("mine")
    result = pipegraph("trace", "merge", folder, "-o", tmp_path / "trace.json")
    assert result.code == 2 and "--overwrite" in result.err
    assert (tmp_path / "trace.json").read_text() == "mine"
    assert pipegraph("trace", "merge", folder, "-o", tmp_path / "trace.json", "--overwrite").code == 0


def test_report_prints_and_writes_a_page(pipegraph: Command, folder: Path, tmp_path: Path) -> None:
    result = pipegraph("trace", "report", folder.parent, "--html", tmp_path / "pages" / "run.html")
    assert (result.code, result.err) == (0, "")
    assert "why it is idle" in result.out and result.out.endswith(f"wrote {tmp_path / 'pages' / 'run.html'}\n")
    assert (tmp_path / "pages" / "run.html").read_text().startswith("<!doctype html>")


def test_report_as_json(pipegraph: Command, folder: Path, tmp_path: Path) -> None:
    result = pipegraph("trace", "report", folder, "--json", "--html", tmp_path / "run.html")
    report = json.loads(result.out)
    assert report["schema_version"] == 1
    assert report["bubble"][1]["transfers"] == pytest.approx(0.001)
    assert (tmp_path / "run.html").exists()


def test_report_shows_what_is_there(pipegraph: Command, folder: Path) -> None:
    (folder / f"rank_01.{DIGITS}.pt.trace.json.gz").write_bytes(b"\x1f\x8b")
    result = pipegraph("trace", "report", folder)
    assert result.code == 0
    assert f"problem: rank_01.{DIGITS}.pt.trace.json.gz: it is truncated" in result.out
    assert "problem: rank 1 of 2 has no trace" in result.out


@pytest.mark.parametrize("verb", [("merge", "-o", "x.json"), ("report",)])
def test_a_folder_without_traces_is_an_error(verb: tuple[str, ...], pipegraph: Command, tmp_path: Path) -> None:
    result = pipegraph("trace", verb[0], tmp_path, *verb[1:])
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {tmp_path} has no traces") and "Try: pipegraph run" in result.err


@pytest.mark.parametrize(
    ("rows", "step", "cause", "difference"),
    [(FAR, 10.0, "transfers", 1.0), (SLOW_HOST, 9.25, "overhead", 0.25), (UNEVEN, 15.0, "computing", 3.0)],
)
def test_compare_says_what_differs(
    rows: list[list[Event]], step: float, cause: str, difference: float, pipegraph: Command, tmp_path: Path
) -> None:
    slow = write_run(tmp_path / "one" / "slow", SCHEDULE, {3: rows}, manifest(2))
    even = write_run(tmp_path / "other" / "even", SCHEDULE, {3: EVEN}, manifest(2))
    result = pipegraph("trace", "compare", even, slow.parent)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("A  even: 1f1b") and lines[1].startswith("B  slow: 1f1b")
    compared = json.loads(pipegraph("trace", "compare", even, slow, "--json").out)
    assert compared["step"]["step"] == pytest.approx({"a": 9e-3, "b": step / 1000, "ratio": step / 9})
    for run in ("a", "b"):  # the parts of a step add up to it
        assert sum(part[run] for part in compared["shares"].values()) == pytest.approx(compared["step"]["step"][run])
    differences = {name: part["b"] - part["a"] for name, part in compared["shares"].items()}
    assert differences[cause] == max(differences.values()) == pytest.approx(difference / 1000)
    (said,) = [line for line in lines if line.startswith("B takes ")]
    assert f"more; the largest difference is {cause}, +" in said
    assert next(line.split()[:3] for line in lines if line.startswith("stage ")) == ["stage", "0", "F"]


def test_compare_takes_one_step_of_several(pipegraph: Command, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SCHEDULE, {3: EVEN, 4: UNEVEN}, manifest(2))
    compared = json.loads(pipegraph("trace", "compare", run, run, "--json").out)
    assert compared["step"]["step"]["a"] == pytest.approx(9e-3)
    assert sum(part["a"] for part in compared["shares"].values()) == pytest.approx(9e-3)


def test_compare_the_same_run(pipegraph: Command, folder: Path) -> None:
    result = pipegraph("trace", "compare", folder, folder)
    assert result.code == 0 and "B takes" not in result.out and result.out.count("1.000") > 2
    missing = pipegraph("trace", "compare", folder, folder.parent / "none")
    assert (missing.code, missing.out) == (2, "")


def test_compare_runs_of_other_stages(pipegraph: Command, folder: Path, tmp_path: Path) -> None:
    schedule = build("1f1b", 4, 4)
    four = write_run(tmp_path / "four" / "run", schedule, {3: rows_of(schedule, Times.equal(4))}, manifest(4))
    result = pipegraph("trace", "compare", folder, four)
    assert result.code == 0 and "A has 2 stages and B has 4" in result.out
