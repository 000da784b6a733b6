"""A run's folder, whole and damaged: what is wrong is named, and the rest is there."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipegraph.errors import ArgumentError, PipegraphError
from pipegraph.schedule import Times, build
from pipegraph.tracing.analysis.run_analysis import analyse_run
from pipegraph.tracing.merged_trace import merge_traces
from pipegraph.tracing.read_run import read_pipelines, read_run
from tests.messages import refused
from tests.tracing.recordings import DIGITS, manifest, rows_of, write_run

SCHEDULE = build("1f1b", 2, 3)
TIMES = Times.equal(2, 0.001, 0.001, 0.001, hop=0.0001)
ROWS = rows_of(SCHEDULE, TIMES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps of 1f1b on 2 ranks; rank 1's clock is 0.5 s ahead."""
    package_manifest = manifest(2, TIMES)
    return write_run(tmp_path / "run", SCHEDULE, {4: ROWS, 5: ROWS}, package_manifest, offsets=[0.0, -0.5])


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:02d}.{DIGITS}.pt.trace.json.gz"


def changed(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    trace = json.loads(gzip.decompress(file.read_bytes()))
    change(trace)
    file.write_bytes(gzip.compress(json.dumps(trace).encode()))


def test_all_ranks_are_on_one_clock(folder: Path) -> None:
    run = read_run(folder)
    assert run.problems == ()
    for rank, row in enumerate(ROWS):
        spans = [span for span in run.ranks[rank].spans if span.step == 4]
        assert [(span.action, span.start, span.end) for span in spans] == [
            (event.action, pytest.approx(event.start, abs=1e-9), pytest.approx(event.end, abs=1e-9)) for event in row
        ]
    assert run.ranks[1].clock.offset == -0.5
    assert run.clock_error == pytest.approx(2e-6)
    assert run.ranks[0].steps[4][1] - run.ranks[0].steps[4][0] == pytest.approx(ROWS[0][-1].end + 0.005)
    assert {span.bytes for span in run.ranks[0].spans} == {0, 65536}


def test_the_newest_of_several_runs_is_read_and_said(folder: Path) -> None:
    older = write_run(folder.parent / "zzz", SCHEDULE, {1: ROWS}, run="older")
    for file in older.glob("rank_*"):
        file.rename(older / file.name.replace(str(DIGITS), str(DIGITS - 1)))
    run = read_run(folder.parent)
    assert run.folder == folder
    assert run.notes == (f"run is the newest of the 2 runs in {folder.parent}",)


@pytest.mark.parametrize(
    ("where", "problem"), [("missing", "does not exist"), ("file", "is a file"), ("empty", "no traces")]
)
def test_a_folder_without_a_trace(where: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with refused(PipegraphError, str(tmp_path / where), problem, advice="pipegraph run"):
        read_run(tmp_path / where)


def test_a_rank_without_a_file_is_named_and_the_others_shown(folder: Path) -> None:
    file_of(folder, 1).unlink()
    run = read_run(folder)
    assert run.problems == ("rank 1 of 2 has no trace",)
    analysis = analyse_run(run)
    assert [bubble.rank for bubble in analysis.idle] == [0]
    assert analysis.times.times.forward == pytest.approx((0.001, 0.001))
    (assumed,) = analysis.times.assumed
    assert assumed.startswith("stage 1 has no trace and takes what the other stages suggest")
    assert not analysis.advice.changes
    assert analysis.advice.sentence.startswith("There is none: it takes the times of all stages")
    assert analysis.critical is None


@pytest.mark.parametrize("part", [0.5, 0.9])
def test_a_truncated_file_is_named_and_read_as_far_as_it_goes(part: float, folder: Path) -> None:
    file = file_of(folder, 1)
    all_spans = read_run(folder).ranks[1].spans
    data = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(data[: int(len(data) * part)]))
    run = read_run(folder)
    assert run.problems == (f"{file.name}: it is truncated",)
    spans = run.ranks[1].spans
    assert 0 < len(spans) < len(all_spans) and spans == all_spans[: len(spans)]
    assert analyse_run(run).idle


def test_a_file_that_does_not_say_when_it_was_is_left_out(folder: Path) -> None:
    changed(file_of(folder, 1), lambda trace: trace.pop("baseTimeNanoseconds"))
    assert read_run(folder).problems == (
        f"{file_of(folder, 1).name} has no time base, and is left out",
        "rank 1 of 2 has no trace",
    )


def test_a_truncated_archive_is_named(folder: Path) -> None:
    file = file_of(folder, 1)
    file.write_bytes(file.read_bytes()[:300])
    assert read_run(folder).problems[0] == f"{file.name}: it is truncated"


def test_a_file_that_is_no_trace_is_named(folder: Path) -> None:
    file_of(folder, 1).write_text("not gzip, not JSON")
    problems = read_run(folder).problems
    assert problems[0].startswith(f"{file_of(folder, 1).name}: it is not a Chrome trace")
    assert problems[-1] == "rank 1 of 2 has no trace"


def test_no_readable_trace_is_an_error(folder: Path) -> None:
    for rank in range(2):
        file_of(folder, rank).write_bytes(b"")
    with refused(PipegraphError, "no trace that can be read", "rank_00", "truncated", advice="pipegraph run"):
        read_run(folder)


def test_a_file_of_another_run_is_left_out(folder: Path) -> None:
    second_file = file_of(folder, 0).with_name(f"rank_00.{DIGITS + 1}.pt.trace.json.gz")
    second_file.write_bytes(file_of(folder, 0).read_bytes())
    changed(second_file, lambda trace: trace["pipegraph"].update(run="another"))
    run = read_run(folder)
    assert run.problems == (f"{second_file.name} is of another run (another, not run-1), and left out",)
    assert {span.step for span in run.ranks[0].spans} == {4, 5}


def test_files_of_another_plan_are_left_out(folder: Path) -> None:
    def renumber_stages(trace: dict[str, Any]) -> None:
        for event in trace["traceEvents"]:
            if "stage" in event["args"]:
                event["args"]["stage"] += 2

    changed(file_of(folder, 1), renumber_stages)
    problems = read_run(folder).problems
    assert problems[0].startswith(f"{file_of(folder, 1).name} is of another plan: rank 1 does 3F0 in it")
    assert problems[1] == "rank 1 of 2 has no trace"


def test_files_of_more_ranks_are_left_out(folder: Path) -> None:
    changed(file_of(folder, 1), lambda trace: trace["pipegraph"].update(ranks=4))
    assert "rank 1 of 4, and the schedule has 2 ranks" in read_run(folder).problems[0]


@pytest.mark.parametrize("with_info", [True, False])
def test_a_run_of_a_mesh_is_read_pipeline_by_pipeline(with_info: bool, tmp_path: Path) -> None:
    mesh, rows = {"pp": 2, "dp_shard": 2}, {4: rows_of(SCHEDULE, TIMES)}
    for number, line in enumerate(((0, 2), (1, 3))):
        how: dict[str, Any] = {"mesh": mesh, "line": line, "processes": 4, "begin": 1 + 0.25 * number}
        run = write_run(tmp_path / "run", SCHEDULE, rows, manifest(2, TIMES), **how)
    if not with_info:
        (run / "run.json").unlink()
    first, second = read_pipelines(run)
    assert (first.line, second.line) == ((0, 2), (1, 3))
    assert (first.place, second.place) == ("dp_shard 0", "dp_shard 1")
    assert second.origin - first.origin == pytest.approx(0.25e9)
    assert len(first.ranks) == len(second.ranks) == 2 and not first.shares_process
    assert not second.problems or not with_info
    assert "this is the pipeline at dp_shard 1, one of 2; --pipeline 0 shows another" in second.notes
    merge_traces([first, second], tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names[3] == "rank 3 (pp 1, dp_shard 1): stage 1" and names.keys() == {0, 1, 2, 3}
    starts = [min(span["ts"] for span in events if span["ph"] == "X" and span["pid"] == rank) for rank in range(2)]
    assert starts[1] - starts[0] == pytest.approx(0.25e6)


def test_a_pipeline_that_a_run_does_not_have_is_refused(folder: Path) -> None:
    with refused(ArgumentError, "pipeline=1", "1 pipeline", advice="pipeline=0"):
        read_run(folder, 1)


def test_a_manifest_of_another_plan_is_named(folder: Path) -> None:
    (folder / "pipeline.json").write_text(manifest(3).to_json())
    run = read_run(folder)
    assert run.problems == ("pipeline.json is of another plan: it has 3 stages, and the schedule 2",)
    assert analyse_run(run).expected is None


@pytest.mark.parametrize("name", ["run.json", "pipeline.json", "schedule.csv"])
@pytest.mark.parametrize("text", [None, "", "{", "[]", "\x00\xff", '{"schema_version": 1}', 50_000 * "["])
def test_other_files_of_a_run_may_be_missing_or_damaged(name: str, text: str | None, folder: Path) -> None:
    file = folder / name
    if text is None:
        file.unlink()
    else:
        file.write_text(text, encoding="latin-1")
    run = read_run(folder)
    assert any(name in problem for problem in run.problems)
    assert tuple(run.schedule.actions) == SCHEDULE.actions
    assert len(analyse_run(run).idle) == 2


@pytest.mark.parametrize("name", ["run.json", "pipeline.json", "schedule.csv"])
def test_other_files_of_a_run_may_be_endless(name: str, folder: Path) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(1_500_000_000)  # a hole, which takes no space
    assert any(name in problem and "it has 1500000000 bytes" in problem for problem in read_run(folder).problems)


def test_traces_alone_show_the_schedule(folder: Path) -> None:
    for name in ("run.json", "pipeline.json", "schedule.csv"):
        (folder / name).unlink()
    run = read_run(folder)
    assert run.schedule.actions == SCHEDULE.actions and run.schedule.placement == (0, 1)


def test_spans_of_the_gpu_go_before_those_of_the_host(folder: Path) -> None:
    def with_gpu(trace: dict[str, Any]) -> None:
        for event in list(trace["traceEvents"]):
            args = event.get("args", {})
            if event.get("cat") == "user_annotation" and args.get("kind") in ("F", "B"):
                gpu = {**event, "cat": "gpu_user_annotation", "ts": event["ts"] + 100}
                half = event["dur"] / 2  # in each of two streams
                trace["traceEvents"] += [{**gpu, "dur": half}, {**gpu, "ts": gpu["ts"] + half, "dur": half}]

    changed(file_of(folder, 0), with_gpu)
    run = read_run(folder)
    trace = run.ranks[0]
    assert trace.on_gpu and not run.ranks[1].on_gpu
    assert {str(span.action.kind) for span in trace.spans} == {"F", "B"}  # the host's transfers tell nothing here
    first = next(span for span in run.ranks[0].spans if span.step == 4)
    assert first.end - first.start == pytest.approx(0.001)
    other_spans = [span for span in run.ranks[1].spans if span.step == 4 and span.action.kind == "F"]
    assert other_spans[0].start - first.start == pytest.approx(0.0011 - 0.0001)


def test_a_file_that_may_not_be_read_is_named(folder: Path) -> None:
    file = file_of(folder, 1)
    file.unlink()
    os.symlink(folder / "gone", file)
    assert read_run(folder).problems[0] == f"{file.name} cannot be read: No such file or directory"


def test_figures_that_no_clock_shows_are_left_out(folder: Path) -> None:
    changed(file_of(folder, 0), lambda trace: trace["traceEvents"][-1].update(ts=10**400))
    changed(file_of(folder, 1), lambda trace: trace["pipegraph"]["clock"].update(offset_ns=10**400))
    (folder / "run.json").write_text((folder / "run.json").read_text().replace('"processes": 2', '"processes": 1e999'))
    problems = read_run(folder).problems
    assert f"{file_of(folder, 1).name}: its entry of pipegraph is damaged" in problems
    assert any(problem.startswith("run.json is damaged (OverflowError") for problem in problems)
