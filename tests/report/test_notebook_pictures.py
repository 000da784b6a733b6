"""What a person at a prompt or in a notebook sees of each object: its repr in a line, its table or its picture."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import pipegraph
from pipegraph.package import Package
from pipegraph.planner.plan import Plan
from pipegraph.report import notebook_pictures
from pipegraph.schedule import Action, Schedule, Times, build, lower, names, simulate
from tests.captures import captured
from tests.report.test_package_picture import HOSTILE, PRICED, SIZES, package
from tests.runtime.packages import write
from tests.runtime.sketches import chain


@pytest.fixture(scope="module")
def plan() -> Plan:
    return pipegraph.plan(captured("tests/models/chain.py"), stages=2, microbatches=4)


class Texts(HTMLParser):
    """The tags and the texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_a_repr_is_a_line(plan: Plan, tmp_path: Path) -> None:
    pipe = pipegraph.Pipeline(write(chain(2), tmp_path / "small"), "1f1b", 4, kernels="eager")
    timeline = simulate(build("1f1b", 2, 3), Times.equal(2))
    texts = [repr(subject) for subject in (plan.captured, plan, pipe.package, pipe, timeline)]
    expected = [
        r"Captured\(\w+: \d+ segments, [\d.]+ k? ?parameters, sizes batch\)",
        r"Plan\(\w+ in 2 stages, cut at layers\.\d+; [\d.]+ [mµ]s a step of 1f1b with 4 microbatches\)",
        r"Package\(/.*/small: \w+ in 2 stages\)",
        r"Pipeline\(small: 1f1b with 4 microbatches; all 2 stages on 2 ranks in one process, cpu, kernels eager\)",
        r"Timeline\(makespan 12, bubble 25\.0 %, 12 actions on 2 ranks, at most 2 saved activations\)",
    ]
    for text, pattern in zip(texts, expected, strict=True):
        assert re.fullmatch(pattern, text), text


def test_a_captured_model_is_a_table_of_its_layers(plan: Plan) -> None:
    page = Texts(plan.captured._repr_html_() or "")
    cells = [text for text in page.texts if text]
    start = cells.index("operations") + 1
    assert cells[start : start + 8] == [
        "layers.0 – layers.3", "Sequential × 4", "288", "8", "head", "Linear", "18", "1",
    ]  # fmt: skip
    assert any(text == "dynamic sizes: batch" for text in cells)
    assert any(text.startswith("x.shape[1] is 8 in every batch") for text in cells)


def test_a_plan_is_a_table_with_its_reasons(plan: Plan) -> None:
    page = Texts(plan._repr_html_() or "")
    assert page.tags.count("table") == 1 and page.tags.count("tr") == 3
    assert {"stage", "holds", "parameters", "F", "I", "W"} <= {*page.texts}
    assert any(text.startswith("predicted ") for text in page.texts)
    assert any(text.startswith("stage 1 begins at layers.") for text in page.texts)
    unpriced = Texts(pipegraph.plan(plan.captured, points=["layers.2"])._repr_html_() or "")
    assert "forward" in unpriced.texts and "li" not in unpriced.tags


def test_a_package_has_its_tables_and_its_step() -> None:
    page = Texts(package(3, PRICED, skips=((0, 2),))._repr_html_() or "")
    assert page.tags.count("table") == 2 and page.tags.count("svg") == 1
    assert "stage 0 → stage 2" in page.texts


@pytest.mark.parametrize("made", [package(2, PRICED, name=HOSTILE), package(2, SIZES, name=HOSTILE)])
def test_names_stay_text(made: Package) -> None:
    page = Texts(made._repr_html_() or "")
    assert "script" not in page.tags
    assert any("<script>" in text for text in page.texts)


@pytest.mark.parametrize("name", names())
def test_every_schedule_has_a_picture(name: str) -> None:
    schedule = build(name, 2, 4)
    timeline = simulate(lower(schedule), Times.equal(schedule.stages))
    for svg in (schedule._repr_svg_(), timeline._repr_svg_()):
        picture = ElementTree.fromstring(svg or "")
        boxes = [element for element in picture.iter() if re.match(r"\d+[FIWB]\d+:", element.text or "")]
        assert len(boxes) == sum(map(len, schedule.actions))


def test_what_is_too_large_or_wrong_has_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Schedule("wrong", (0, 1), 1, ((Action.parse("0F0"),), (Action.parse("1B0"),)))
    assert wrong._repr_svg_() is None
    schedule = build("1f1b", 2, 3)
    timeline = simulate(schedule, Times.equal(2))
    monkeypatch.setattr(notebook_pictures, "_MOST", 11)
    assert schedule._repr_svg_() is None and timeline._repr_svg_() is None
    page = Texts(package(4, PRICED)._repr_html_() or "")
    assert "svg" not in page.tags and "table" in page.tags
