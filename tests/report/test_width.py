"""Every table on narrow, usual and wide terminals: no line is wider, and no word is broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipegraph.cost.hardware import Hardware
from pipegraph.planner.run_comparison import compare_run
from pipegraph.report.text import bar_width, short_modules, table, wrap
from pipegraph.report.text.hardware_profile import render_hardware
from pipegraph.report.text.package_tables import render_package
from pipegraph.report.text.plan_tables import render_prediction, render_prediction_summary
from pipegraph.report.text.predicted_vs_measured import render_run_comparison
from pipegraph.report.text.schedule_report import render_schedule
from pipegraph.report.text.trace_report import render_trace_report
from pipegraph.schedule import Times, build, names
from pipegraph.schedule.lower_bound import SimulatedSchedule
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


REPORTS = (_package, _prediction, _run, _trace, _hardware)


def words(text: str) -> set[str]:
    """All words but bars, and what a grid is made of."""
    return {word for word in text.split() if not re.search("[█▓░─]", word)}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("report", REPORTS)
def test_a_report_fits(report: Callable[[int | None, Path], str], width: int, tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir(), (tmp_path / "narrow").mkdir()
    whole, laid_out = report(None, tmp_path / "wide"), report(width, tmp_path / "narrow")
    too_long = [line for line in laid_out.split("\n") if len(line) > width]
    assert not [line for line in too_long if len(re.findall(r"\S  +\S", line)) > 1]  # prose, and no row of a table
    shown = wrap(laid_out, width)
    assert max(map(len, shown.split("\n"))) <= width
    notes = words("\n".join(line for line in shown.split("\n") if line.startswith("left out: ")))
    headers = {"stage", "rank", "predicted", "measured", "error", "F", "I", "W", "B"}
    broken = {word for word in words(shown) - words(whole) - notes - headers if not word.endswith("…")}
    assert not {word for word in broken if not re.fullmatch(r"\d[FIWB]\d+|[−+]?[\d.]+", word)}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("name", names())
def test_a_schedule_fits(name: str, coloured: bool, width: int) -> None:
    schedule = build(name, 4, 8)
    simulated = SimulatedSchedule(schedule, Times.equal(schedule.stages))
    shown = wrap(render_schedule(simulated, width, coloured).plain, width)
    assert max(map(len, shown.split("\n"))) <= width


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
        "stage  holds                       bytes",
        "    0  embed, layers.0 – lay…    2.0 MiB",
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


def test_parts_of_a_layer_stand_together() -> None:
    assert short_modules("layers.2.attn, layers.2.norm, layers.3, head") == "layers.2[attn…norm], layers.3, head"
    assert short_modules("layers.0 – layers.3, layers.4.attn") == "layers.0 – layers.3, layers.4.attn"
    assert short_modules("down.0.0.conv, down.0.1.conv, down.1.0.conv") == "down.0[0.conv…1.conv], down.1.0.conv"
