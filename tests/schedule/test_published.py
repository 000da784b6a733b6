"""The figures that papers give for the schedules: a formula for the bubble, and measured settings.

p ranks, m microbatches, v chunks; f, b, w: seconds of F, I and W of a rank's stages together; c: seconds of a hop.
The bubble is the cost of a step less m(f+b+w). The cost is the makespan, or the span where it says so.
"""

import pytest

from pipegraph.schedule import Times, build, peak_activations, simulate

# Whole numbers that 2 and 3 chunks divide, so that the floats are exact.
TIMES = [(6, 6, 6), (6, 12, 6), (12, 6, 6), (18, 24, 12), (18, 12, 6), (12, 12, 18), (6, 18, 24)]
SMALL_W = [(f, b, w) for f, b, w in TIMES if w <= min(f, b)]
RANKS = [1, 2, 3, 4, 7]


def cost(name: str, p: int, m: int, v: int, f: float, b: float, w: float, c: float = 0) -> tuple[float, float]:
    """(makespan, span)"""
    schedule = build(name, p, m, v)
    timeline = simulate(schedule, Times.equal(p * v, f / v, b / v, w / v, c))
    return timeline.makespan, timeline.span


def bubble(name: str, p: int, m: int, v: int, f: float, b: float, w: float, c: float = 0) -> float:
    return cost(name, p, m, v, f, b, w, c)[0] - m * (f + b + w)


def span_bubble(name: str, p: int, m: int, v: int, f: float, b: float, w: float, c: float = 0) -> float:
    return cost(name, p, m, v, f, b, w, c)[1] - m * (f + b + w)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("f", "b", "w"), TIMES)
def test_gpipe(p: int, f: int, b: int, w: int) -> None:
    for m in (1, p, 2 * p + 3):
        for c in (0, 1, 50):
            assert bubble("gpipe", p, m, 1, f, b, w, c) == (p - 1) * (f + b + w + 2 * c)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("f", "b", "w"), TIMES)
def test_1f1b(p: int, f: int, b: int, w: int) -> None:
    for m in (1, p, 2 * p + 3):
        assert bubble("1f1b", p, m, 1, f, b, w) == (p - 1) * (f + b + w)
    for m in (p, 3 * p, 6 * p) if p > 1 else ():  # one rank has no hop
        hops = 2 * m // p * (p - 1) + 2 * (p - 2)
        assert bubble("1f1b", p, m, 1, f, b, w, 2) == (p - 1) * (f + b + w) + 2 * hops


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("f", "b", "w"), TIMES)
def test_eager_1f1b(p: int, f: int, b: int, w: int) -> None:
    for m in (1, p, 2 * p + 3):
        for c in (0, 1, (f + b + w) / 2):
            assert bubble("eager-1f1b", p, m, 1, f, b, w, c) == (p - 1) * (f + b + w + 2 * c)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("f", "b", "w"), TIMES)
def test_interleaved_1f1b_and_looped_bfs(p: int, v: int, f: int, b: int, w: int) -> None:
    for m in (p, 2 * p, 4 * p):
        assert bubble("interleaved-1f1b", p, m, v, f, b, w) == (p - 1) * (f + b + w) / v
    for m in (p, p + 1, 3 * p + 2):  # fewer do not keep the first rank busy until its first microbatch is back
        assert bubble("looped-bfs", p, m, v, f, b, w) == (p - 1) * (f + b + w) / v


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("f", "b", "w"), SMALL_W)
def test_zb_h(p: int, f: int, b: int, w: int) -> None:
    for m in (p, p + 1, 3 * p + 2):
        assert bubble("zb-h1", p, m, 1, f, b, w) == (p - 1) * (f + b - w)
    for m in (2 * p - 1, 2 * p, 4 * p + 1):
        for c in (0, 1, w):
            assert span_bubble("zb-h2", p, m, 1, f, b, w, c) == (p - 1) * (f + b + 2 * c - 2 * w)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("f", "b", "w"), SMALL_W)
def test_interleaved_zb(p: int, v: int, f: int, b: int, w: int) -> None:
    for m in (p, 2 * p, 4 * p):
        assert bubble("interleaved-zb", p, m, v, f, b, w) == (p - 1) * (f + b - w) / v


@pytest.mark.parametrize("p", RANKS)
def test_zb_v(p: int) -> None:
    for m in (2 * p - 1, 2 * p, 4 * p + 1):
        assert bubble("zb-v", p, m, 2, 6, 6, 6) == (p - 1) * 6 / 2
        assert span_bubble("zb-v", p, m, 2, 6, 6, 6) == 0


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("f", "w"), [(6, 6), (6, 4), (10, 2), (6, 0)])
def test_dualpipe_v(p: int, f: int, w: int) -> None:
    """In the times of one stage, f = b; a pair, F&B, takes as long as F and B one after the other."""
    full = f + w
    for m in (2 * p, 2 * p + 1, 4 * p + 1):
        assert bubble("dualpipe-v", p, m, 2, 2 * f, 2 * f, 2 * w) == (p - 1) * ((f + full) + full - 3 * w)


@pytest.mark.parametrize(
    ("name", "p", "slots"),
    [("v-min", 4, 11), ("v-min", 6, 17), ("v-min", 8, 27), ("v-half", 4, 5), ("v-half", 6, 11), ("v-half", 8, 17)],
)
def test_controllable_memory(name: str, p: int, slots: int) -> None:
    memory = (p + 4) // 3 if name == "v-min" else (p + 2) // 2  # microbatches of a whole rank, of two stages each
    for m in (2 * p - 1, 2 * p, 5 * p + 1):
        assert span_bubble(name, p, m, 2, 2, 2, 2) == slots
        assert max(peak_activations(build(name, p, m))) == 2 * memory


# Zero Bubble Pipeline Parallelism (ICLR 2024): 1F1B and H1 by makespan, H2 by span. Microseconds.
@pytest.mark.parametrize(
    ("p", "m", "times", "of_1f1b", "of_h1", "of_h2"),
    [
        (8, 24, (18522, 18086, 9337, 601), 0.2431, 0.1585, 0.1083),
        (8, 32, (18513, 18086, 9331, 626), 0.1985, 0.1242, 0.0837),
        (8, 64, (18546, 18097, 9321, 762), 0.1240, 0.0674, 0.0444),
        (8, 24, (29718, 29444, 19927, 527), 0.2347, 0.1323, 0.0698),
    ],
)
def test_measured_settings(
    p: int, m: int, times: tuple[int, int, int, int], of_1f1b: float, of_h1: float, of_h2: float
) -> None:
    work = m * sum(times[:3])
    assert round(1 - work / cost("1f1b", p, m, 1, *times)[0], 4) == of_1f1b
    assert round(1 - work / cost("zb-h1", p, m, 1, *times)[0], 4) == of_h1
    assert round(1 - work / cost("zb-h2", p, m, 1, *times)[1], 4) == of_h2


# The paper has .1055 for the first: its simulator lets all microbatches of a group but the first go from the last rank
# back to the first before they are there.
@pytest.mark.parametrize(
    ("v", "times", "rate"), [(3, (18522, 18086, 9337, 601), 0.1090), (4, (29718, 29444, 19927, 527), 0.0827)]
)
def test_measured_settings_of_interleaved_1f1b(v: int, times: tuple[int, int, int, int], rate: float) -> None:
    makespan, _ = cost("interleaved-1f1b", 8, 24, v, *times)
    assert round(1 - 24 * sum(times[:3]) / makespan, 4) == rate
