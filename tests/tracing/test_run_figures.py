"""What `pipegraph run` leaves of its losses and its memory in the folder of a recorded run, and where it is shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipegraph.planner.run_comparison import PredictedAndMeasured
from pipegraph.report.html_pages import trace_page
from pipegraph.report.text.run_report import render_trace_report, trace_report_dict
from pipegraph.tracing.analysis.run_analysis import RunAnalysis, analyse_run
from pipegraph.tracing.read_run import read_run
from pipegraph.tracing.run_figures import FILE, RunFigures
from tests.tracing.recordings import manifest, write_run
from tests.tracing.test_idle_causes import EVEN, SCHEDULE


def figures(*losses: float) -> RunFigures:
    steps: list[dict[str, Any]] = [
        {"index": index, "loss": loss, "tokens_per_second": 1000.0 * index or None, "flops_per_second": 1e9 * 2**index}
        for index, loss in enumerate(losses)
    ]
    memory = [{"parameters": PredictedAndMeasured(2048, 1024)}, {"parameters": PredictedAndMeasured(None, 512)}]
    together = [PredictedAndMeasured(4096, None), PredictedAndMeasured(None, None)]
    return RunFigures.of_run([*steps, {"index": 1, "loss": 0.5}], memory, together, peak_flops=1e10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", SCHEDULE, {3: EVEN}, manifest(2))


def analysed(folder: Path) -> RunAnalysis:
    return analyse_run(read_run(folder))


def test_figures_are_read_as_they_were_written(folder: Path) -> None:
    written = figures(2.0, math.nan, -math.inf, 1e301, 0.5)
    written.write(folder)
    assert RunFigures.read(folder) == written
    assert [(loss.step, loss.loss) for loss in written.losses] == [
        *((0, 2.0), (1, None), (2, None), (3, None), (4, 0.5))
    ]
    assert written.tokens_per_second == 4000


def test_the_report_shows_them(folder: Path) -> None:
    figures(2.0, 1.0, 0.5).write(folder)
    analysis = analysed(folder)
    text = render_trace_report(analysis)
    assert "loss 2 at step 0, 0.5 at step 2; 2,000 tokens/s" in text
    # The first step, which compiles, does not count.
    assert "3.0 GFLOP/s of the model in a step, 30.0 % of the peak of the devices (MFU)" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines() if line.startswith(("parameters", "together"))]
    assert rows == [
        ["parameters", "2.0", "KiB", "1.0", "KiB", "—", "512", "B"],
        ["together", "4.0", "KiB", "—", "—", "—"],
    ]
    page = trace_page(analysis)
    assert '<polyline points="0.0,0.0 300.0,80.0 600.0,120.0"' in page and "Memory of each rank" in page
    assert trace_report_dict(analysis)["figures"]["losses"][2] == {"step": 2, "loss": 0.5}


def test_one_step_has_no_curve(folder: Path) -> None:
    figures(2.0).write(folder)
    page = trace_page(analysed(folder))
    assert "<polyline" not in page and "loss 2 at step 0; 1.0 GFLOP/s" in page


def test_a_run_without_them_is_shown(folder: Path) -> None:
    analysis = analysed(folder)
    assert analysis.run.figures is None and trace_report_dict(analysis)["figures"] is None
    assert "Memory of each rank" not in trace_page(analysis)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"losses": 3, "memory": []}', '{"losses": [], "memory": [], "schema_version": 2}']
)
def test_damaged_figures_are_a_problem_of_the_run(content: str, folder: Path) -> None:
    (folder / FILE).write_text(content)
    analysis = analysed(folder)
    assert analysis.run.figures is None
    (problem,) = analysis.run.problems
    assert FILE in problem and "\n" not in problem
    assert f"problem: {problem}" in render_trace_report(analysis)


def test_names_of_another_tool_stay_text(folder: Path) -> None:
    content = {"losses": [], "memory": [{"<script>": {"predicted": 1.0, "measured": 2.0}}], "schema_version": 1}
    (folder / FILE).write_text(json.dumps(content))
    assert "<script>:" not in trace_page(analysed(folder)) and "&lt;script&gt;" in trace_page(analysed(folder))
