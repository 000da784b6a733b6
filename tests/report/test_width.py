"""Every table on narrow, usual and wide terminals: no line is wider, and no word is broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pipegraph.cost.hardware import Hardware
from pipegraph.planner.comparison import PlanComparison
from pipegraph.planner.cut_choice import CutChoice
from pipegraph.planner.joint_plan.choices import JointComparison
from pipegraph.planner.run_comparison import compare_run
from pipegraph.report.text import bar_width, short_modules, table, wrap
from pipegraph.report.text.package_tables import (
    render_hardware,
    render_joint_comparison,
    render_package,
    render_plan_comparison,
    render_prediction,
    render_prediction_summary,
)
from pipegraph.report.text.run_report import render_merge, render_run_comparison, render_trace_report
from pipegraph.report.text.schedule_report import render_schedule
from pipegraph.schedule import Times, build, names
from pipegraph.schedule.lower_bound import SimulatedSchedule
from pipegraph.tracing.merged_trace import MergedTrace
from tests.report.test_package_picture import PRICED, package
from tests.report.test_plan_tables import PREDICTION
from tests.report.test_predicted_vs_measured import MEASURED
from tests.report.test_predicted_vs_measured import PRICED as MANIFEST
from tests.report.test_trace_page import analysed

WIDTHS = (60, 80, 120)
LONG = "layers.10.multihead_attention.a_module_with_a_long_name"


def _package(width: int | None, folder: Path) -> str:
    return render_package(package(4, PRICED, skips=((0, 2),), name=LONG), build("zb-v", 2, 8), width).plain


def _prediction(width: int | None, folder: Path) -> str:
    return f"{render_prediction_summary(PREDICTION)}\n{render_prediction(PREDICTION, width).plain}"


def _run(width: int | None, folder: Path) -> str:
    return render_run_comparison(compare_run(MANIFEST, build("1f1b", 2, 2), MEASURED), width)


def _trace(width: int | None, folder: Path) -> str:
    return render_trace_report(analysed(folder, "zb-v", 2, 4), width)


def _hardware(width: int | None, folder: Path) -> str:
    return render_hardware(Hardware.load("h100"), width)


def _merge(width: int | None, folder: Path) -> str:
    run = analysed(folder, "interleaved-1f1b", 2, 4).run
    return render_merge([run], Path("build/trace.json.gz"), MergedTrace(192, 48, 2, 3), None, width)


def _plan_comparison(width: int | None, folder: Path) -> str:
    choices = tuple(_choice(name, stages) for name, stages in (("interleaved-1f1b", 16), ("1f1b", 8)))
    return render_plan_comparison(
        cast("PlanComparison", SimpleNamespace(choices=choices, best=choices[0], considered=72)), width
    )


def _joint_comparison(width: int | None, folder: Path) -> str:
    layout = SimpleNamespace(pp=8, dp_replicate=16, dp_shard=32, tp=4)
    choices = []
    for name, stages in (("interleaved-1f1b", 16), ("dualpipe-v", 16)):
        candidate = SimpleNamespace(layout=layout, schedule=name, rows=2, microbatches=64, resident=None)
        fields = vars(_choice(name, stages)) | {"candidate": candidate, "step": 12.5, "solution": _choice(name, stages)}
        choices.append(SimpleNamespace(**fields))
    neighbours = [SimpleNamespace(axis="dp_replicate", value="8", choice=choices[1])]
    neighbours.append(SimpleNamespace(axis="recompute", value="min-cut", choice=None))
    of_all = {"considered": 123_456, "searched": 12, "gap": 0.004}
    comparison = SimpleNamespace(choices=choices, best=choices[0], neighbours=neighbours, **of_all)
    return render_joint_comparison(cast("JointComparison", comparison), 4096, 16384, 8192, width)


def _choice(name: str, stages: int) -> CutChoice:
    schedule, options = SimpleNamespace(name=name, stages=stages, microbatches=64), SimpleNamespace()
    options.recompute_text = "stages 0 – 3: block, stages 4 – 15: layers.*=block, *.mlp=none"
    figures = {"value": 12.5, "per_microbatch": 0.195, "peak": 79 * 2**30}
    return cast("CutChoice", SimpleNamespace(schedule=schedule, options=options, **figures))


REPORTS = (_package, _prediction, _run, _trace, _merge, _hardware, _plan_comparison, _joint_comparison)


def words(text: str) -> set[str]:
    """All words but bars, and what a grid is made of."""
    return {word for word in text.split() if not re.search("[█▓░─]", word)}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("report", REPORTS)
def test_a_report_fits(report: Callable[[int | None, Path], str], width: int, tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir(), (tmp_path / "narrow").mkdir()
    wide_report, laid_out = report(None, tmp_path / "wide"), report(width, tmp_path / "narrow")
    too_long = [line for line in laid_out.split("\n") if len(line) > width]
    assert not [line for line in too_long if len(re.findall(r"\S  +\S", line)) > 1]  # prose, and no row of a table
    wrapped = wrap(laid_out, width)
    commands = [line for line in wrapped.split("\n") if line.startswith("    pipegraph ")]  # to be copied as they are
    assert max(len(line) for line in wrapped.split("\n") if line not in commands) <= width
    notes = words("\n".join(line for line in laid_out.split("\n") if line.startswith("left out: ")))
    headers = {"stage", "rank", "predicted", "measured", "error", "F", "I", "W", "B"}
    broken = {word for word in words(wrapped) - words(wide_report) - notes - headers if not word.endswith("…")}
    assert not {word for word in broken if not re.fullmatch(r"\d[FIWB]\d+|[−+]?[\d.]+", word)}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("name", names())
def test_a_schedule_fits(name: str, coloured: bool, width: int) -> None:
    schedule = build(name, 4, 8)
    simulated = SimulatedSchedule(schedule, Times.equal(schedule.stages))
    wrapped = wrap(render_schedule(simulated, width, coloured).plain, width)
    assert max(map(len, wrapped.split("\n"))) <= width


HEADERS = ["stage", "holds", "bytes", "file"]
ROWS = [
    ["0", "embed, layers.0 – layers.17", "2.0 MiB", "stage-00000-of-00002.safetensors"],
    ["1", "head", "100 B", ""],
]


def test_columns_are_left_out_in_their_order() -> None:
    assert table(HEADERS, ROWS) == (
        "stage  holds                            bytes  file\n"
        "    0  embed, layers.0 – layers.17    2.0 MiB  stage-00000-of-00002.safetensors\n"
        "    1  head                         100 B"
    )
    assert table(HEADERS, ROWS, 60, ("file", "bytes")) == (
        "stage  holds                            bytes\n"
        "    0  embed, layers.0 – layers.17    2.0 MiB\n"
        "    1  head                         100 B\n"
        "left out: file; --wide shows all"
    )
    assert table(HEADERS, ROWS, 40, ("file", "bytes")).split("\n")[:2] == [
        "stage  holds                    bytes",
        "    0  embed, layers.0 – …    2.0 MiB",
    ]
    long = [["0", "a.b" * 20, "2.0 MiB", "stage-00000-of-00002.safetensors"]]
    headers = [*HEADERS[:3], "a column of its own"]
    assert table(headers, long, 40, ("bytes",)).endswith("left out: bytes; --wide shows all")


def test_a_bar_shrinks_and_goes() -> None:
    assert [bar_width(40, width, 40) for width in (None, 100, 60, 44)] == [40, 40, 20, 0]


def test_a_line_goes_on_below_its_label() -> None:
    assert wrap("note: one two three four five six seven eight", 40) == (
        "note: one two three four five six seven\n  eight"
    )
    assert wrap("memory     8.6 MiB on the fullest rank with min-cut", 40) == (
        "memory     8.6 MiB on the fullest rank\n           with min-cut"
    )
    assert wrap("x" * 50, 40) == "x" * 50  # a word is never broken
    assert wrap("critical path: rank 0 20 %, rank 11 10 %, rank 2 9 %", 40).split("\n") == [
        "critical path: rank 0 20 %, rank 11",
        "  10 %, rank 2 9 %",
    ]  # nor is a figure
    command = "    pipegraph split model.py --hardware hardware.json --stages 2"
    assert wrap(command, 40) == command  # nor is a command


def test_parts_of_a_layer_stand_together() -> None:
    assert short_modules("layers.2.attn, layers.2.norm, layers.3, head") == "layers.2[attn…norm], layers.3, head"
    assert short_modules("layers.0 – layers.3, layers.4.attn") == "layers.0 – layers.3, layers.4.attn"
    assert short_modules("down.0.0.conv, down.0.1.conv, down.1.0.conv") == "down.0[0.conv…1.conv], down.1.0.conv"
