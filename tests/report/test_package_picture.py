"""A package as a picture and as a page: what stands in them, and what no package can do to them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from msgspec import structs

from pipegraph.package import Manifest, ModelEntry, Package, PlanEntry, StageCost, StageEntry, Value
from pipegraph.package.prediction import Cut
from pipegraph.planner.step_prediction import memory_by_kind
from pipegraph.report.html_pages import package_page
from pipegraph.report.package_picture import package_picture
from pipegraph.schedule import build
from tests.package.predictions import prediction
from tests.report.browser import needs_chromium, opened

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"
SIZES = StageCost(parameters=1000, parameter_bytes=4 * MIB, trained_bytes=3 * MIB, buffer_bytes=MIB, flops=5 * 10**9)
PRICED = structs.replace(SIZES, forward=0.001, input_grad=0.002, weight_grad=0.003, saved_bytes=7 * MIB)
REASON = "it is best there"
HOSTILE = '</svg><script>alert("1")</script>\x00 &amp; \n' + "long" * 50


def package(stages: int, cost: StageCost, skips: tuple[tuple[int, int], ...] = (), name: str = "h") -> Package:
    values = {"x": Value("x", "int64", (8, 128), -1, (0,))}
    inputs: list[list[str]] = [["x"], *([] for _ in range(stages - 1))]
    outputs: list[list[str]] = [[] for _ in range(stages)]
    edges = [*((at, at + 1) for at in range(stages - 1)), *skips]
    for number, (producer, consumer) in enumerate(edges):
        value_name = f"{name}{number}"
        values[value_name] = Value(value_name, "float32", (8, 128, 512), producer, (consumer,), requires_grad=True)
        outputs[producer].append(value_name)
        inputs[consumer].append(value_name)
    values["y"] = Value("y", "float32", (8, 10), stages - 1, ())
    outputs[-1].append("y")
    cuts = (Cut("layers.1", MIB, None, None, REASON),) * (stages - 1)
    plan = PlanEntry(
        stages=tuple(f"{name}.{at}" for at in range(stages)),
        prediction=prediction(stages, cuts=cuts) if cost.forward is not None else None,
    )
    entries = (
        StageEntry(at, f"stage_{at}", f"Stage{at}", tuple(inputs[at]), tuple(outputs[at]), cost=cost)
        for at in range(stages)
    )
    manifest = Manifest(
        generator="pipegraph",
        model=ModelEntry("m.py", name),
        args=("x",),
        kwargs={},
        outputs="y",
        values=values,
        stages=tuple(entries),
        plan=plan,
    )
    return Package(Path("package"), manifest)


def picture(pkg: Package, schedule: str = "1f1b", ranks: int | None = None) -> Element:
    return ElementTree.fromstring(package_picture(pkg, build(schedule, ranks or len(pkg.manifest.stages), 4)).package)


def visible_texts(root: Element) -> list[str]:
    """The text in the picture, without titles that a browser shows on hover."""
    texts = root.iter(f"{SVG}text")
    return ["".join(element.itertext()).removeprefix(element.findtext(f"{SVG}title") or "") for element in texts]


def test_stages_and_what_crosses() -> None:
    root = picture(package(3, PRICED, skips=((0, 2),)))
    texts = visible_texts(root)
    assert [text for text in texts if re.fullmatch(r"stage \d", text)] == ["stage 0", "stage 1", "stage 2"]
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert "stage 0 to stage 2: h2 float32[8, 128, 512]" in titles
    assert any("2.0 MiB, the same back" in text for text in texts)
    assert "2.0 MiB" in texts  # next to the line that goes around stage 1
    assert any(text.endswith("x  int64[8, 128]  ·  8.0 KiB") for text in texts)
    assert any(text.endswith("the model's output") for text in texts)


def test_costs_are_bars_in_one_scale() -> None:
    root = picture(package(2, PRICED))
    bars: dict[str, list[float]] = {}
    for box in root.iter(f"{SVG}rect"):
        if match := re.fullmatch(r"([FIW]) \d\.\d+ ms", box.findtext(f"{SVG}title") or ""):
            bars.setdefault(match[1], []).append(float(box.get("width", "")))
    assert {kind: len(widths) for kind, widths in bars.items()} == {"F": 2, "I": 2, "W": 2}
    assert bars["I"][0] == pytest.approx(2 * bars["F"][0], abs=0.02)
    assert bars["W"][1] == pytest.approx(3 * bars["F"][1], abs=0.02)
    assert visible_texts(root).count("6.000 ms") == 2


def test_memory_by_kind() -> None:
    priced_package = package(4, PRICED)
    ranks = memory_by_kind(priced_package.manifest, build("zb-v", 2, 4))
    assert [rank.by_kind()["parameters"] for rank in ranks] == [8 * MIB] * 2
    assert [rank.by_kind()["gradients"] for rank in ranks] == [6 * MIB] * 2
    assert [rank.by_kind()["optimizer state"] for rank in ranks] == [12 * MIB] * 2
    assert all(rank.by_kind()["activations"] >= 4 * 7 * MIB for rank in ranks)
    assert all(rank.by_kind()["model buffers"] + rank.by_kind()["receive buffers"] > 2 * MIB for rank in ranks)
    assert all(rank.total == sum(rank.by_kind().values()) for rank in ranks)
    (alone,) = memory_by_kind(package(1, PRICED).manifest, build("forward", 1, 4))
    assert alone.gradients == alone.optimizer_state == 0


def test_without_costs_it_is_said_what_would_give_them() -> None:
    texts = visible_texts(picture(package(2, SIZES)))
    assert "No times were predicted: pipegraph split … --balance time predicts them." in texts
    assert "activations are not known: --balance time predicts them" in texts
    assert texts.count("5.0 GFLOP") == 2
    texts = visible_texts(picture(package(2, StageCost())))
    assert "the costs of the stages are not known" in texts
    assert any(text.startswith("not known: this package has no sizes") for text in texts)


@pytest.mark.parametrize(("stages", "schedule", "ranks"), [(1, "gpipe", 1), (16, "1f1b", 16), (16, "zb-v", 8)])
@pytest.mark.parametrize("cost", [StageCost(), SIZES, PRICED], ids=["bare", "sizes", "priced"])
def test_nothing_lies_outside(stages: int, schedule: str, ranks: int, cost: StageCost) -> None:
    skip_package = package(stages, cost, tuple((0, last) for last in range(2, stages, 3)), name="layer")
    order = build(schedule, ranks, 16)
    root = ElementTree.fromstring(package_picture(skip_package, order).package)
    width = float(root.get("width", ""))
    assert width < 1700
    for box in root.iter(f"{SVG}rect"):
        if box.get("width") != "100%":
            assert float(box.get("x", "0")) + float(box.get("width", "")) <= width
    lanes = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.findtext(f"{SVG}title") is not None]
    assert len(lanes) == len(range(2, stages, 3))
    corners = [float(lane.split("L")[1].split(" ")[0]) for lane in lanes]
    assert len(set(corners)) == len(corners) and min(corners, default=1.0) > 0


def test_a_name_breaks_neither_picture_nor_page() -> None:
    hostile_package = package(3, PRICED, skips=((0, 2),), name=HOSTILE)
    root = picture(hostile_package)
    assert root.find(f".//{SVG}script") is None
    assert not any("long" * 30 in text for text in visible_texts(root))  # clipped everywhere
    page = package_page(hostile_package, build("1f1b", 3, 4))
    assert _Page(page).tags.count("script") == 2
    assert "alert(" not in page.replace("&lt;script&gt;alert(&#34;1&#34;)", "")
    assert "\x00" not in page


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_holds_cards_timeline_and_tables_and_loads_nothing() -> None:
    priced_package = package(2, PRICED)
    text = package_page(priced_package, build("1f1b", 2, 4))
    page = _Page(text)
    assert page.loaded == ["data:,"] and not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text
    assert (page.tags.count("canvas"), page.tags.count("ol"), page.tags.count("table")) == (1, 1, 3)
    assert text.count('<span class="badge">rank') == 2
    assert "<b>rank 0 to rank 1</b>: h0 float32[8, 128, 512] → stage 1 · 2.0 MiB, 2.0 MiB back" in text
    assert f"stage 1 begins at layers.1: {REASON}" in text
    assert "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3" in text
    assert text == package_page(priced_package, build("1f1b", 2, 4))


def test_what_stays_on_a_rank_says_so_first() -> None:
    priced_package, order = package(4, PRICED), build("zb-v", 2, 4)
    assert "<b>same rank, no transfer</b>: h1 float32[8, 128, 512] → stage 2" in package_page(priced_package, order)
    texts = visible_texts(ElementTree.fromstring(package_picture(priced_package, order).package))
    (stays,) = (text for text in texts if "same rank" in text)
    assert stays == "same rank, no transfer  ·  h1  ·  2.0 MiB"


def test_a_timeline_that_would_shrink_has_a_picture_of_its_own() -> None:
    narrow, wide = (package_picture(package(4, PRICED), build("1f1b", 4, count)) for count in (4, 64))
    assert narrow.timeline is None and "time in ms" in narrow.package
    assert wide.timeline is not None and "time in ms" in wide.timeline
    assert "time in ms" not in wide.package and "in a separate picture" in wide.package
    assert float(ElementTree.fromstring(wide.timeline).get("width", "")) > 1900


def test_times_that_are_not_known_are_no_seconds() -> None:
    page = package_page(package(2, SIZES), build("1f1b", 2, 4))
    assert '"unitless":true' in page and "No times are known" in page


@needs_chromium
@pytest.mark.parametrize("width", [390, 700, 1280])
def test_a_browser_draws_the_page(width: int, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(package_page(package(4, PRICED, skips=((0, 2),)), build("zb-v", 2, 4)))
    page = opened(file, width, until=' data-drawn="')
    assert page.console == ()
    assert 'data-drawn="48"' in page.dom  # F, I and W of 4 stages and 4 microbatches
