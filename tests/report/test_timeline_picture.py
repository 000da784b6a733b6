"""Schedules as pictures. The golden one is renewed by ``pytest tests/report --renew-golden``."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from pipegraph.report.colours import COLLECTIVES, colour
from pipegraph.report.timeline_picture import schedule_svg, timeline_drawing
from pipegraph.schedule import Action, Kind, Schedule, Times, build, lower, names
from pipegraph.schedule.lower_bound import SimulatedSchedule

GOLDEN = Path(__file__).parent / "golden" / "1f1b.svg"
TIMES = Times((0.01, 0.02, 0.015), (0.012, 0.02, 0.01), (0.005, 0.01, 0.008), hop=0.001)
TIMES_OF_TWO = Times((0.01, 0.02), (0.012, 0.02), (0.005, 0.01))
SVG = "{http://www.w3.org/2000/svg}"


def picture(schedule: Schedule, times: Times | None = None) -> tuple[SimulatedSchedule, Element]:
    simulation = SimulatedSchedule(schedule, times or Times.equal(schedule.stages), in_seconds=times is not None)
    return simulation, ElementTree.fromstring(schedule_svg(simulation))


def boxes(root: Element) -> dict[str, tuple[Element, str]]:
    """action → (its box, its colour)"""
    action_boxes = {}
    for box in root.iter(f"{SVG}rect"):
        if (title := box.findtext(f"{SVG}title")) is not None:
            action_boxes[title.partition(":")[0]] = box, box.get("fill", "")
    return action_boxes


def test_kinds_differ_without_colour() -> None:
    """I is hatched, W has a foot, and B both; a box too narrow for them has none."""
    for name, hatched, footed in (("zb-h1", "I", "W"), ("1f1b", "B", "B"), ("gpipe", "B", "B")):
        schedule = build(name, 2, 4)
        text = schedule_svg(SimulatedSchedule(schedule, Times.equal(2)))
        count = {kind: sum(action.kind.value == kind for row in schedule.actions for action in row) for kind in "IWB"}
        assert text.count('fill="url(#hatch-') == count[hatched] + 1  # and one in the legend
        assert text.count('fill-opacity="0.6"') == count[footed] + 1


def test_a_small_schedule_looks_as_it_did(pytestconfig: pytest.Config) -> None:
    text = schedule_svg(SimulatedSchedule(build("1f1b", 2, 2), Times.equal(2)))
    if pytestconfig.getoption("renew_golden", default=False):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_collectives_lie_below_the_actions_of_their_rank() -> None:
    schedule = lower(build("1f1b", 2, 2), sharded=[0, 1])
    simulation, root = picture(schedule, replace(TIMES_OF_TWO, unshard=0.02, reduce_grad=0.01))
    action_boxes = boxes(root)
    for rank, collectives in enumerate(simulation.timeline.collectives):
        forward = _numbers(action_boxes[f"{rank}F0"][0])
        for event in collectives.events:
            box, fill = action_boxes[str(event.collective)]
            assert fill == COLLECTIVES[event.collective.kind]
            assert forward["y"] + forward["height"] < _numbers(box)["y"]
        gather = _numbers(action_boxes[f"{rank}UNSHARD"][0])
        assert gather["width"] == pytest.approx(2 * _numbers(action_boxes["0F0"][0])["width"], abs=1)
    assert _numbers(action_boxes["1UNSHARD"][0])["y"] < _numbers(action_boxes["1F0"][0])["y"] + 34
    assert "that stage gathered" in ElementTree.tostring(root, encoding="unicode")


@pytest.mark.parametrize("name", names())
def test_every_action_has_a_box_as_long_as_it_lasts(name: str) -> None:
    schedule = build(name, 3, 6)
    chunks = schedule.stages // 3
    times = Times(TIMES.forward * chunks, TIMES.input_grad * chunks, TIMES.weight_grad * chunks, TIMES.hop)
    simulation, root = picture(schedule, times)
    rectangles = {action: _numbers(box) for action, (box, _) in boxes(root).items()}
    events = [event for row in simulation.timeline.events for event in row]
    assert len(rectangles) == len(events)
    latest = max(events, key=lambda event: event.start)
    origin = rectangles["0F0"]["x"]
    scale = (rectangles[str(latest.action)]["x"] - origin) / latest.start
    for event in events:
        box = rectangles[str(event.action)]
        assert box["x"] == pytest.approx(origin + event.start * scale, abs=0.02)
        assert (event.end - event.start) * scale - 1 < box["width"] < (event.end - event.start) * scale
    lanes = [{rectangles[str(event.action)]["y"] for event in row} for row in simulation.timeline.events]
    assert [len(lane) for lane in lanes] == [1, 1, 1]
    assert len(set.union(*lanes)) == 3


def test_kinds_and_stages_have_their_colours() -> None:
    _, root = picture(build("zb-v", 2, 4))
    action_boxes = boxes(root)
    assert action_boxes["0F0"][1] == colour(Kind.F, 0, 2)
    assert action_boxes["3F0"][1] == colour(Kind.F, 1, 2)
    assert action_boxes["1I2"][1] == colour(Kind.I, 0, 2)
    assert action_boxes["2W2"][1] == colour(Kind.W, 1, 2)


def test_numbers_stand_in_boxes_that_have_room() -> None:
    _, root = picture(build("gpipe", 2, 3))
    assert sum(text.text == "2" for text in root.iter(f"{SVG}text")) >= 4
    _, root = picture(build("gpipe", 2, 3000))
    assert "2999" not in [text.text for text in root.iter(f"{SVG}text")]


def test_only_hops_take_time() -> None:
    _, root = picture(build("1f1b", 2, 2), Times.equal(2, 0, 0, 0, hop=1.0))
    assert len(boxes(root)) == 8


def test_the_head_shows_the_figures() -> None:
    _, root = picture(build("1f1b", 2, 2))
    captions = "\n".join(text.text or "" for text in root.iter(f"{SVG}text"))
    assert "1f1b: 2 ranks, 2 stages, 2 microbatches" in captions
    assert "makespan 9 (bubble 33.3 %)" in captions
    assert "lower bound 7 (gap 28.6 %)" in captions


def test_messages_are_drawn_if_they_are_few() -> None:
    lines = re.compile(r'<path d="M[^"]*" fill="none" stroke="#6b7280"')
    few = lines.findall(schedule_svg(SimulatedSchedule(build("gpipe", 3, 4), Times.equal(3))))
    assert len(few) == 2 * 2 * 4  # boundaries, directions, microbatches
    assert not lines.findall(schedule_svg(SimulatedSchedule(build("gpipe", 3, 40), Times.equal(3))))


def test_an_image_has_what_the_picture_has() -> None:
    pytest.importorskip("PIL", reason="Pillow comes with tensorboard")
    schedule = build("1f1b", 2, 2)
    timeline = SimulatedSchedule(schedule, TIMES_OF_TWO).timeline
    drawing = timeline_drawing(schedule, timeline, "measured, step 3")
    image = drawing.to_image()
    assert (image.width, image.height) == (2 * drawing.width, 2 * drawing.height)
    (first,) = (shape for shape in drawing.shapes if getattr(shape, "title", "").startswith("0F0"))
    inside = image.getpixel((round(2 * first.x + 6), round(2 * first.y + 6)))
    assert "#{:02x}{:02x}{:02x}".format(*inside) == colour(Kind.F)


def test_a_name_cannot_break_the_picture() -> None:
    row = (Action(0, Kind.F, 0), Action(0, Kind.B, 0))
    _, root = picture(Schedule('<script>"&\x00\n]]>' * 20, (0,), 1, (row,)))
    assert root.find(f"{SVG}script") is None
    assert (root.findtext(f"{SVG}title") or "").startswith('<script>"&')


def test_times_of_nothing() -> None:
    _, root = picture(build("gpipe", 2, 2), Times.equal(2, 0, 0, 0))
    assert len(boxes(root)) == 8


def _numbers(box: Element) -> dict[str, float]:
    return {name: float(box.get(name, "")) for name in ("x", "y", "width", "height")}
