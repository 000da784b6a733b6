"""Every schedule can be recorded, analysed and merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegraph.report.text.run_report import render_trace_report
from pipegraph.schedule import Times, build, names
from pipegraph.tracing.analysis.run_analysis import analyse_run
from pipegraph.tracing.merged_trace import merge_traces
from pipegraph.tracing.read_run import read_run
from tests.tracing.chrome import read_strictly
from tests.tracing.recordings import manifest, rows_of, write_run


@pytest.mark.parametrize("name", names())
def test_a_run_that_went_as_predicted(name: str, tmp_path: Path) -> None:
    schedule = build(name, 2, 4)
    times = Times.equal(schedule.stages, 0.002, 0.001, 0.001)
    folder = write_run(tmp_path / "run", schedule, {7: rows_of(schedule, times)}, manifest(schedule.stages, times))
    run = read_run(folder)
    analysis = analyse_run(run)
    assert run.problems == () and analysis.step.complete
    assert run.schedule.overlapped == schedule.overlapped
    for bubble in analysis.idle:
        assert bubble.causes.imbalance == bubble.causes.transfers == 0.0
    if schedule.trains:
        assert analysis.critical is not None and analysis.critical.makespan == pytest.approx(analysis.makespan)
    assert "problem" not in render_trace_report(analysis)
    merged = merge_traces([run], tmp_path / "trace.json", analysis.expected)
    trace = read_strictly(tmp_path / "trace.json")
    computed = sum(map(len, schedule.actions))
    assert (merged.slices, merged.early) == (computed + 2 * merged.flows, 0)
    predicted = [event for event in trace["traceEvents"] if event.get("cat") == "predicted"]
    assert len(predicted) == computed
