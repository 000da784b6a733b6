"""Schedules drawn on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.style import Style
from rich.text import Text

from pipegraph.report.colours import COLLECTIVES, colour, ink
from pipegraph.report.text.schedule_report import render_grid, render_legend
from pipegraph.schedule import Kind, Schedule, Times, build, lower, simulate
from pipegraph.units import TimeFormat


def grid_text(schedule: Schedule, width: int | None = None, coloured: bool = False, times: Times | None = None) -> Text:
    timeline = simulate(schedule, times or Times.equal(schedule.stages))
    return render_grid(schedule, timeline, width, coloured, TimeFormat())


def backgrounds(text: Text, number: int) -> list[tuple[str, str]]:
    """(letters, their background) of one line, neighbours of one colour joined."""
    spans: list[tuple[str, str]] = []
    line = text.split("\n")[number]
    for at, letter in enumerate(line.plain):
        style = line.get_style_at_offset(Console(), at)
        name = "" if style.bgcolor is None else style.bgcolor.name
        if spans and spans[-1][1] == name:
            spans[-1] = (spans[-1][0] + letter, name)
        else:
            spans.append((letter, name))
    return spans


def test_kinds_have_their_colours() -> None:
    text = grid_text(build("1f1b", 2, 2), coloured=True)
    f, b = colour(Kind.F, 0, 1), colour(Kind.B, 0, 1)
    assert backgrounds(text, 1) == [("rank 0  ", ""), (" 0 1", f), ("    ", ""), (" 0  ", b), ("  ", ""), (" 1  ", b)]
    assert backgrounds(text, 2) == [("rank 1    ", ""), (" 0", f), (" 0  ", b), (" 1", f), (" 1  ", b)]


def test_stages_of_a_rank_have_their_tones() -> None:
    text = grid_text(build("looped-bfs", 1, 2), coloured=True)
    first, second = colour(Kind.F, 0, 2), colour(Kind.F, 1, 2)
    assert backgrounds(text, 1)[1:3] == [(" 0 1", first), (" 0 1", second)]
    assert render_legend(build("looped-bfs", 1, 2)).plain == (
        " F  F  forward    B  B  backward (I and W)   0 critical path   dark to light: a rank's first to last stage"
    )


def test_collectives_stand_below_their_rank() -> None:
    schedule, times = lower(build("gpipe", 1, 1), sharded=[0]), Times.equal(1, unshard=1, reduce_grad=3)
    assert grid_text(schedule, times=times).plain.splitlines()[1:] == [
        "rank 0      0F0 0B0────",
        "        0U─             0R─────────",
    ]
    text = grid_text(schedule, coloured=True, times=times)
    gather, reduction = COLLECTIVES.values()
    assert backgrounds(text, 2) == [("        ", ""), ("U ", gather), ("      ", ""), ("0R─── ", reduction)]
    assert " U  parameters gathered    R  gradients reduced   0 critical path" in render_legend(schedule).plain
    folded = grid_text(schedule, 20, times=times).plain.splitlines()
    assert folded[1:3] == ["rank 0      0F0 0B0─", "        0U─"]
    assert folded[5:7] == ["rank 0  ───", "            0R──────"]


def test_the_critical_path_is_underlined() -> None:
    schedule = build("1f1b", 2, 2)
    text = grid_text(schedule, coloured=True)
    marked = [span for span in text.spans if isinstance(span.style, Style) and span.style.underline]
    lines = text.plain.splitlines(keepends=True)
    first = len(lines[0]) + len(lines[1])  # where the line of rank 1 begins
    numbers = [(int(span.start >= first), text.plain[span.start : span.end]) for span in marked]
    path = simulate(schedule, Times.equal(2)).critical_path
    assert sorted(numbers) == sorted((event.action.stage, str(event.action.microbatch)) for event in path)


def test_a_wide_grid_is_folded_into_equal_blocks() -> None:
    assert grid_text(build("gpipe", 2, 6), width=60).plain.splitlines() == [
        "time    0                   5                   10",
        "rank 0  0F0 0F1 0F2 0F3 0F4 0F5             0B0────",
        "rank 1      1F0 1F1 1F2 1F3 1F4 1F5 1B0──── 1B1────",
        "",
        "time                    15                  20",
        "rank 0  0B1──── 0B2──── 0B3──── 0B4──── 0B5────",
        "rank 1  1B2──── 1B3──── 1B4──── 1B5────",
    ]


def test_a_long_schedule_is_one_picture_on_a_terminal() -> None:
    schedule = build("1f1b", 16, 512)
    lines = grid_text(schedule, width=100).plain.splitlines()
    assert len(lines) == 17
    assert max(map(len, lines)) <= 100


def test_waiting_for_a_slow_link_does_not_fill_the_screen() -> None:
    slow = Times.equal(2, hop=1e9)
    assert max(map(len, grid_text(build("gpipe", 2, 2), times=slow).plain.splitlines())) < 300


def test_times_of_nothing() -> None:
    assert grid_text(build("gpipe", 2, 1), times=Times.equal(2, 0, 0, 0)).plain == "time\nrank 0\nrank 1"


def test_an_action_too_short_for_its_name_shows_its_kind() -> None:
    times = Times((9.0, 1.0), (9.0, 1.0), (9.0, 1.0))
    _, first, second = grid_text(build("zb-h1", 2, 2), times=times).plain.splitlines()
    assert first.startswith("rank 0  0F0───────────────────────── 0F1─────")
    assert second.split() == ["rank", "1", "F─", "I─", "F─", "I─", "W─", "W─"]


def test_text_is_readable_on_every_tone() -> None:
    for kind in (Kind.F, Kind.I, Kind.W, Kind.B):
        for chunks in (1, 2, 5):
            for chunk in range(chunks):
                background = colour(kind, chunk, chunks)
                assert _contrast(background, ink(background)) >= 4.5, (kind, chunk, chunks)


def _contrast(first_colour: str, second_colour: str) -> float:
    lighter, darker = sorted((_luminance(first_colour), _luminance(second_colour)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(tone: str) -> float:
    channels = [int(tone[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
