"""The page of a recorded run: safe against any name, and drawn by a real browser."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import force_setattr

from pipegraph.cost.hardware import Hardware
from pipegraph.report import html_pages
from pipegraph.report.colours import MEANING, colour
from pipegraph.report.colours import ink as ink_on
from pipegraph.report.html_pages import page_data, script_json, trace_page
from pipegraph.report.text.run_report import prediction_error, render_trace_report, trace_report_dict
from pipegraph.schedule import CollectiveKind, Event, Times, build, lower, simulate, without_transfers
from pipegraph.tracing.analysis.run_analysis import RunAnalysis, analyse_run
from pipegraph.tracing.read_run import read_run
from tests.report.browser import needs_chromium, opened
from tests.tracing.recordings import DIGITS, manifest, rows_of, write_run

HOSTILE = "</script><script>alert(1)</script><!--\u2028'\"&{{7*7}}"
TIMES = Times.equal(2, 0.001, 0.001, 0.001, hop=0.0002)
SCHEDULE = build("1f1b", 2, 3)


def analysed(
    folder: Path, name: str = "1f1b", ranks: int = 2, microbatches: int = 3, layer: str = "layers"
) -> RunAnalysis:
    schedule = build(name, ranks, microbatches)
    times = Times.equal(schedule.stages, 0.001, 0.001, 0.001, hop=0.0002)
    rows: Sequence[Sequence[Event]] = rows_of(schedule, times)
    run_manifest = manifest(schedule.stages, times, name=layer)
    return analyse_run(read_run(write_run(folder / "run", schedule, {4: rows, 5: rows, 6: rows}, run_manifest)))


def analysed_with_collectives(folder: Path, messages: Sequence[Mapping[str, Any]] = ()) -> RunAnalysis:
    """Both stages are gathered before the step, and their gradients are reduced while it runs."""
    schedule = without_transfers(lower(SCHEDULE, sharded=range(2)))
    schedule = SCHEDULE.changed(collectives=schedule.collectives)
    times = replace(TIMES, unshard=0.0005, reduce_grad=0.0004)
    events = [lane.events for lane in simulate(schedule, times).collectives]
    rows = rows_of(schedule, times)
    run_manifest = manifest(2, TIMES, plan={"hardware": "h100"})
    run = write_run(folder / "run", schedule, {4: rows, 5: rows}, run_manifest, spans=events, messages=messages)
    return analyse_run(read_run(run))


class Outline(HTMLParser):
    """The elements of a page, and what they name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = trace_page(analysed(tmp_path))
    for tag, attributes in Outline(page).elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,"
    assert "default-src 'none'" in page
    assert not re.search(r"(?:https?:)?//[a-z]", page)


def test_the_page_says_what_the_timeline_shows(tmp_path: Path) -> None:
    page = trace_page(analysed(tmp_path))
    (canvas,) = (attributes for tag, attributes in Outline(page).elements if tag == "canvas")
    assert str(canvas["aria-label"]).startswith("Timeline of a step on 2 ranks")
    assert canvas["tabindex"] == "0"
    for text in ("1f1b with 3 microbatches on 2 ranks", "warm-up and drain", "What to change", "rank 1"):
        assert text in page


@pytest.mark.parametrize("where", ["folder", "schedule", "run", "layer", "class"])
def test_no_name_gets_out_of_its_place(where: str, tmp_path: Path) -> None:
    run_manifest = manifest(2, TIMES, name=f"{HOSTILE}.layers" if where == "layer" else "layers")
    if where == "class":
        force_setattr(run_manifest.model, "class_name", HOSTILE)
    folder = write_run(tmp_path / "run", SCHEDULE, {1: rows_of(SCHEDULE, TIMES)}, run_manifest)
    run = json.loads((folder / "run.json").read_text())
    run |= {"schedule": {"schedule": HOSTILE, "run": "1f1b"}.get(where, "1f1b"), "device": HOSTILE, "kernels": HOSTILE}
    (folder / "run.json").write_text(json.dumps(run))
    if where == "run":
        (folder / f"rank_00.{DIGITS + 1}.pt.trace.json.gz").write_bytes(b"{" + HOSTILE.encode())
    if where == "folder":
        folder = folder.rename(tmp_path / HOSTILE.replace("/", "|"))
    page = trace_page(analyse_run(read_run(folder)))
    outline = Outline(page).elements
    assert len([tag for tag, _ in outline if tag == "script"]) == 2
    assert "alert(1)</script>" not in page
    assert "\u2028" not in page


def test_data_in_a_script_cannot_end_it() -> None:
    text = script_json({"name": HOSTILE})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"name": HOSTILE}


def test_the_data_are_the_actions_and_messages_of_each_step(tmp_path: Path) -> None:
    data = page_data(analysed(tmp_path))
    step = data["steps"][data["shown"]]
    assert [recorded_step["number"] for recorded_step in data["steps"]] == [4, 5, 6]
    assert step["rows"][0][:2] == [["F", 0, 0, 0.0, 1000.0], ["F", 0, 1, 1000.0, 2000.0]]
    assert step["messages"][0] == [0, 1, 1000.0, 0.0, 1200.0, "SEND_F", 0, 1, 0, 65536]
    assert step["critical"][:2] == [(0, 0), (1, 0)]
    assert [timeline["short"] for timeline in data["below"]] == ["predicted", "simulated"]


def test_collectives_lie_beside_the_actions_of_their_rank(tmp_path: Path) -> None:
    analysis = analysed_with_collectives(tmp_path)
    data = page_data(analysis)
    assert set(data["collectives"]) == {"UNSHARD", "REDUCE_GRAD"}
    for timeline in (data["steps"][0], next(row for row in data["below"] if row["short"] == "simulated")):
        gather, reduction = timeline["beside"][0]
        assert (gather[:3], reduction[:3]) == (["UNSHARD", 0, None], ["REDUCE_GRAD", 0, None])
        assert reduction[4] - reduction[3] == pytest.approx(400)
    last = data["steps"][0]["rows"][0][-1]
    assert data["steps"][0]["beside"][0][1][3] == pytest.approx(last[4])  # when the last backward is done
    page = trace_page(analysis)
    assert "Collectives beside them, in µs (medians)" in page and "below each, its collectives" in page
    assert "Collectives beside" not in trace_page(analysed(tmp_path))


def test_collectives_are_predicted_by_the_links_of_the_profile(tmp_path: Path) -> None:
    """A rank says what it sends for them. What is damaged is told."""
    sent = {"0UNSHARD": [["gather", 2**20, [0, 1]]] * 2, "0REDUCE_GRAD": [["reduce", 2**20, [0, 1]]]}
    analysis = analysed_with_collectives(tmp_path, [sent, {}])
    link = Hardware.load("h100").links.among((0, 1))
    gather, reduction = 2 * link.collective_seconds("gather", 2**20, 2), link.collective_seconds("reduce", 2**20, 2)
    first, second = analysis.collectives
    unshard, reduce_grad = first[CollectiveKind.UNSHARD], first[CollectiveKind.REDUCE_GRAD]
    assert (unshard.predicted, reduce_grad.predicted) == pytest.approx((gather, reduction))
    assert (unshard.measured, reduce_grad.measured) == pytest.approx((0.0005, 0.0004))
    assert second[CollectiveKind.UNSHARD].predicted is None
    assert analysis.expected is not None
    predicted = analysis.expected.collectives[0].events
    assert predicted[0].end - predicted[0].start == pytest.approx(gather)
    text, page = render_trace_report(analysis), trace_page(analysis)
    error = prediction_error(unshard)
    assert "UNSHARD predicted" in text and error in text
    assert "UNSHARD predicted" in page and f"<td>{error}</td>" in page
    collective = {"stage": 0, "kind": "UNSHARD", "predicted": unshard.predicted, "measured": unshard.measured}
    assert collective in trace_report_dict(analysis)["collectives"]
    damaged = analysed_with_collectives(tmp_path / "damaged", [{"0UNSHARD": [["throw", 1, [0]]]}, {}])
    assert any("entry of pipegraph is damaged" in problem for problem in damaged.run.problems)


def test_a_page_holds_as_many_steps_as_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = analysed(tmp_path)
    size = sum(map(len, (*analysis.step.events, *analysis.step.transfers)))
    monkeypatch.setattr("pipegraph.report.html_pages._MOST", 2 * size)
    data = page_data(analysis)
    assert len(data["steps"]) == 2
    assert data["steps"][data["shown"]]["number"] == analysis.step.number


PROBE = """
<script>
  const canvas = document.getElementById("timeline");
  const press = (key, more) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, ...more }));
  const shown = () => canvas.dataset.shown;
  const frames = (then) => setTimeout(then, 200);
  frames(() => {
    const before = shown();
    press("ArrowRight"); press("ArrowRight"); press("ArrowDown");
    document.body.dataset.said = document.getElementById("said").textContent;
    document.body.dataset.docked = document.getElementById("details").textContent;
    press("m"); press("+"); press("w"); press("d"); press("a");
    const [from, to] = shown().split(" ").map(Number);
    document.body.dataset.about = String(from < 1700 && 1700 < to);
    frames(() => {
      document.body.dataset.zoomed = String(shown() !== before);
      const box = canvas.getBoundingClientRect();
      canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + 400, clientY: box.y + 40 }));
      document.body.dataset.tip = document.getElementById("tip").textContent;
      document.body.dataset.measured = document.getElementById("details").textContent;
      document.body.dataset.address = location.hash;
      press("Escape"); press("0");
      const wheel = new WheelEvent("wheel", { deltaY: -200, ctrlKey: true, cancelable: true });
      canvas.dispatchEvent(wheel);
      document.body.dataset.wheel = String(wheel.defaultPrevented);
      for (const id of ["arrows", "critical"]) document.getElementById(id).click();
      for (const id of ["step", "below"]) {
        const select = document.getElementById(id);
        for (const option of [...select.options]) {
          select.value = option.value;
          select.dispatchEvent(new Event("change"));
        }
      }
      frames(() => { document.body.dataset.done = "yes"; });
    });
  });
</script>
"""


@needs_chromium
def test_a_browser_draws_it_and_its_controls_work(tmp_path: Path) -> None:
    page = trace_page(analysed(tmp_path, "zb-v", 2, 4))
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", f"{PROBE}</body>"))
    opened_page = opened(file, until=' data-done="')
    assert opened_page.console == ()
    body = dict(re.findall(r'data-(\w+)="([^"]*)"', opened_page.dom))
    assert body["drawn"] == "48"  # F, I and W of 4 stages and 4 microbatches
    assert body["said"].startswith("Rank 1, forward: stage 1, microbatch 0; from 1.200 ms to 2.200 ms")
    assert body["tip"].startswith(("forward", "input gradient", "weight gradient"))
    assert (body["zoomed"], body["about"], body["wheel"], body["done"]) == ("true", "true", "true", "yes")
    assert body["docked"].startswith("Rank 1, forward: stage 1, microbatch 0")
    assert "Measured: 1.000 ms" in body["measured"]
    assert "action=1-0" in body["address"] and "span=1200.000-2200.000" in body["address"]


HOVER = """
<script>
  const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect();
  setTimeout(() => {
    for (let y = 26; y < 200 && !document.body.dataset.tip; y++) {
      canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + 115, clientY: box.y + y }));
      const said = document.getElementById("tip").textContent;
      if (said.startsWith("parameters gathered")) document.body.dataset.tip = said;
    }
    document.body.dataset.legend = document.getElementById("legend").textContent;
    document.body.dataset.done = "yes";
  }, 300);
</script>
"""


@needs_chromium
def test_a_browser_draws_collectives(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(trace_page(analysed_with_collectives(tmp_path)).replace("</body>", f"{HOVER}</body>"))
    opened_page = opened(file, until=' data-done="')
    assert opened_page.console == ()
    body = dict(re.findall(r'data-(\w+)="([^"]*)"', opened_page.dom))
    assert (body["drawn"], body["beside"]) == ("12", "4")
    assert body["tip"].startswith("parameters gathered: stage 0")
    assert "parameters gathered" in body["legend"] and "gradients reduced" in body["legend"]


@needs_chromium
def test_what_is_seen_stands_in_the_address(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(trace_page(analysed(tmp_path, "zb-v", 2, 4)))
    opened_page = opened(file, until=' data-drawn="', fragment="view=1000.000-3000.000&critical=1&action=1-0")
    assert 'data-shown="1000.000 3000.000"' in opened_page.dom
    assert "Rank 1, forward: stage 1, microbatch 0" in opened_page.dom


@needs_chromium
@pytest.mark.slow
def test_a_large_run_is_drawn_as_well(tmp_path: Path) -> None:
    page = trace_page(analysed(tmp_path, "1f1b", 16, 64))
    file = tmp_path / "page.html"
    file.write_text(page)
    assert len(page) < 2_000_000
    opened_page = opened(file, until=' data-drawn="')
    assert opened_page.console == ()
    assert 'data-drawn="2048"' in opened_page.dom


@needs_chromium
@pytest.mark.parametrize("width", [380, 1900])
def test_a_hostile_name_does_not_run_in_a_browser(width: int, tmp_path: Path) -> None:
    page = trace_page(analysed(tmp_path, layer=f"{HOSTILE}.layers"))
    file = tmp_path / "page.html"
    file.write_text(page)
    opened_page = opened(file, width, until=' data-drawn="')
    assert opened_page.console == ()
    assert 'data-drawn="12"' in opened_page.dom


@needs_chromium
def test_a_broken_script_fails_the_check(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("<script>nonsense()</script>")
    assert "nonsense is not defined" in opened(file).console[0]


def _luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first_colour: str, second_colour: str) -> float:
    """As WCAG 2 has it."""
    darker, lighter = sorted((_luminance(first_colour), _luminance(second_colour)))
    return (lighter + 0.05) / (darker + 0.05)


def test_text_can_be_read_in_both_themes() -> None:
    style = (Path(html_pages.__file__).parent / "pages" / "page.css").read_text()
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", theme)) for theme in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    )
    for theme in (light, dark):
        for ink in ("text", "quiet", "good", "warn"):
            for ground in ("card", "ground", "lane"):
                assert contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)
        assert contrast(theme["accent"], theme["card"]) >= 3  # a line
    for kind in MEANING:
        for tone in (colour(kind), colour(kind, 0, 2), colour(kind, 1, 2)):
            assert contrast(tone, ink_on(tone)) >= 4.5


def test_causes_and_kinds_are_told_apart_without_colour(tmp_path: Path) -> None:
    page = trace_page(analysed(tmp_path, "zb-h1", 2, 4))
    assert {"#0072b2", "#f0e442", "#d55e00", "#009e73", "#cc79a7"} <= set(re.findall(r"#\w{6}", page))
    for kind in ("F", "I", "W"):
        assert f'class="kind-{kind}"' in page
    style = (Path(html_pages.__file__).parent / "pages" / "page.css").read_text()
    assert ".kind-I" in style and ".kind-W" in style and ".kind-F" not in style


def test_wide_tables_scroll_by_themselves(tmp_path: Path) -> None:
    regions = [node for tag, node in Outline(trace_page(analysed(tmp_path))).elements if node.get("class") == "scroll"]
    assert len([region for region in regions if region.get("role") == "region"]) == 3
    assert all(region["tabindex"] == "0" for region in regions)


def test_the_page_has_the_commands_of_the_advice(tmp_path: Path) -> None:
    analysis = analysed(tmp_path)
    assert analysis.advice.commands
    assert all(html.escape(command) in trace_page(analysis) for command in analysis.advice.commands)
