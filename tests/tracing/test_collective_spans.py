"""UNSHARD, RESHARD and REDUCE_GRAD as spans of a lane of their own: for observers, in traces and for TensorBoard."""

from __future__ import annotations

import time
from collections import Counter
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pipegraph.report.text.run_report import render_trace_report
from pipegraph.schedule import Collective, CollectiveKind
from pipegraph.tracing import COLLECTIVE_EVENT, collective_name
from pipegraph.tracing.analysis.run_analysis import analyse_run
from pipegraph.tracing.merged_trace import COLLECTIVES, merge_traces
from pipegraph.tracing.read_run import read_pipelines
from pipegraph.tracing.recording.profiler import ActionSpans
from tests.runtime import ranks
from tests.runtime.meshes import Shape, perceptrons
from tests.runtime.packages import write
from tests.tracing import mesh_loops
from tests.tracing.loops import actions, read

pytest.importorskip("tensorboard", reason="pip install pipegraph[tensorboard]")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"pp": 2, "dp_shard": 2}, {"resident": 1}),
        pytest.param({"pp": 2, "dp_replicate": 2}, {}, marks=pytest.mark.slow),
    ],
    ids=["dp_shard", "dp_replicate"],
)
def test_every_collective_has_its_span(shape: Shape, options: dict[str, Any], tmp_path: Path) -> None:
    package = str(write(perceptrons(4, tied=False), tmp_path / "perceptrons"))
    reports = ranks.run(mesh_loops.record, 4, package, str(tmp_path / "runs"), shape, options, timeout=110)
    assert all(isinstance(report, dict) for report in reports), reports
    for rank in reports:
        assert_seen(rank)
        assert_written(rank)
    (folder,) = {rank["folder"] for rank in reports}  # one of the whole mesh
    assert_read(Path(folder), {rank["rank"]: rank["program"] for rank in reports})


def test_an_interrupted_clock_keeps_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is interrupted between its readings of two clocks reads them up to milliseconds apart."""
    late, now = cycle((3_000_000, 0)), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + next(late))
    spans = ActionSpans(torch.device("cpu"))
    collectives = [Collective(stage, kind) for stage in range(4) for kind in CollectiveKind]
    begin = time.perf_counter()
    for place, collective in enumerate(collectives):
        spans.collective(0, collective, begin + place * 1e-6, begin + (place + 1) * 1e-6, ())
    events = [event for event in spans.take_collectives(None) if event["ph"] == "X"]
    assert [event["name"] for event in events] == [collective_name(operation) for operation in collectives]
    assert all(first["ts"] + first["dur"] <= second["ts"] + 0.3 for first, second in pairwise(events))  # microseconds
    assert [*spans.take_collectives(None)] == []


def assert_seen(rank: dict[str, Any]) -> None:
    """An observer is told of them in their order, none before the one before has ended."""
    assert rank["program"] and [name for name, _, _ in rank["seen"]] == rank["program"]
    assert all(begin <= end for _, begin, end in rank["seen"])
    assert all(first[2] <= second[1] for first, second in pairwise(rank["seen"]))
    assert rank["kept"] == {rank["place"]: rank["program"]}
    assert rank["stages of gathers"] == {int(name[0]) for name in rank["program"] if "UNSHARD" in name}


def assert_written(rank: dict[str, Any]) -> None:
    """The trace of each step has them, on another thread than the actions, and on that one nothing else."""
    (file,) = Path(rank["folder"]).glob(f"rank_{rank['rank']:02d}.*")
    trace = read(file)
    spans = actions(trace, COLLECTIVE_EVENT)
    for step in (1, 2):
        names = [f"{span['args']['stage']}{span['args']['kind']}" for span in spans if span["args"]["step"] == step]
        assert Counter(names) == Counter(rank["program"])
    (lane,) = {span["tid"] for span in spans}
    assert {span["cat"] for span in trace["traceEvents"] if span["ph"] == "X" and span["tid"] == lane} == {"collective"}
    first, last = actions(trace)[0], actions(trace)[-1]
    assert all(first["ts"] - 1e6 < span["ts"] < last["ts"] + 1e6 for span in spans)  # on the same clock


def assert_read(folder: Path, programs: dict[int, list[str]]) -> None:
    runs = read_pipelines(folder)
    assert [run.line for run in runs] == [(0, 2), (1, 3)]
    for run in runs:
        assert not run.problems
        for place, rank in enumerate(run.line):
            placed = [call for call in run.schedule.collectives if run.schedule.placement[call.stage] == place]
            assert len(placed) == len(programs[rank])
            for step in (1, 2):
                spans = [span for span in run.ranks[place].collectives if span.step == step]
                assert [str(span.collective) for span in spans] == programs[rank]
    text = render_trace_report(analyse_run(runs[1]))
    assert "collectives of each stage, in parallel with its actions, in" in text and "REDUCE_GRAD" in text
    for run in runs:
        message_names = {str(collective) for rank in run.ranks.values() for collective in rank.messages}
        assert message_names == {name for rank in run.line for name in programs[rank] if "RESHARD" not in name}
        sent = [message for rank in run.ranks.values() for messages in rank.messages.values() for message in messages]
        assert all(message.size > 0 and len(message.ranks) == 2 for message in sent)
    assert f"at {runs[1].place}" in text.splitlines()[0] and "4 processes" in text.splitlines()[0]
    merged = folder / "merged.json"
    merge_traces(runs, merged)
    events = read_plain(merged)
    lanes = Counter(event["pid"] for event in events if event["ph"] == "X" and event["tid"] == COLLECTIVES)
    assert lanes == {rank: 2 * len(program) for rank, program in programs.items()}


def read_plain(file: Path) -> list[dict[str, Any]]:
    import json

    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events
