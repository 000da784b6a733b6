"""Idle time by cause, on steps of two ranks worked out by hand, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.schedule import Event, Times, build
from pipegraph.tracing.analysis.measured_steps import (
    MeasuredStep,
    SimulatedIdleTimes,
    idle_of_step,
    mean_idle,
    measured_times,
)
from pipegraph.tracing.analysis.run_analysis import RunAnalysis, analyse_run
from pipegraph.tracing.read_run import read_run
from tests.tracing.recordings import event, rows_of, write_run

SCHEDULE = build("1f1b", 2, 2)


def milliseconds(*rows: str) -> list[list[Event]]:
    """``0F0 0 1, 0F1 1 2``: events with their starts and ends."""
    event_rows = []
    for row in rows:
        words = [cell.split() for cell in row.split(",")]
        event_rows.append([event(name, float(start) / 1000, float(end) / 1000) for name, start, end in words])
    return event_rows


EVEN = milliseconds(
    "0F0 0 1, 0SEND_F0 1 1, 0F1 1 2, 0SEND_F1 2 2, 0RECV_B0 2 4, 0B0 4 6, 0RECV_B1 6 7, 0B1 7 9",
    "1RECV_F0 0 1, 1F0 1 2, 1B0 2 4, 1SEND_B0 4 4, 1RECV_F1 4 4, 1F1 4 5, 1B1 5 7, 1SEND_B1 7 7",
)
UNEVEN = milliseconds(  # stage 1 takes twice as long
    "0F0 0 1, 0SEND_F0 1 1, 0F1 1 2, 0SEND_F1 2 2, 0RECV_B0 2 7, 0B0 7 9, 0RECV_B1 9 13, 0B1 13 15",
    "1RECV_F0 0 1, 1F0 1 3, 1B0 3 7, 1SEND_B0 7 7, 1RECV_F1 7 7, 1F1 7 9, 1B1 9 13, 1SEND_B1 13 13",
)
FAR = milliseconds(  # a message takes 0.5
    "0F0 0 1, 0SEND_F0 1 1, 0F1 1 2, 0SEND_F1 2 2, 0RECV_B0 2 5, 0B0 5 7, 0RECV_B1 7 8, 0B1 8 10",
    "1RECV_F0 0 1.5, 1F0 1.5 2.5, 1B0 2.5 4.5, 1SEND_B0 4.5 4.5, 1RECV_F1 4.5 4.5, 1F1 4.5 5.5, 1B1 5.5 7.5, "
    "1SEND_B1 7.5 7.5",
)
SLOW_HOST = milliseconds(  # the host of rank 0 turns to its last action 0.25 late
    "0F0 0 1, 0SEND_F0 1 1, 0F1 1 2, 0SEND_F1 2 2, 0RECV_B0 2 4, 0B0 4 6, 0RECV_B1 6 7, 0B1 7.25 9.25",
    "1RECV_F0 0 1, 1F0 1 2, 1B0 2 4, 1SEND_B0 4 4, 1RECV_F1 4 4, 1F1 4 5, 1B1 5 7, 1SEND_B1 7 7",
)


def analysed(folder: Path, rows: Sequence[Sequence[Event]]) -> RunAnalysis:
    return analyse_run(read_run(write_run(folder / "run", SCHEDULE, {3: rows})))


@pytest.mark.parametrize(
    ("rows", "makespan", "busy", "causes"),
    [
        (EVEN, 9, (6, 6), [(3, 0, 0, 0), (3, 0, 0, 0)]),
        (UNEVEN, 15, (6, 12), [(4.5, 4.5, 0, 0), (3, 0, 0, 0)]),
        (FAR, 10, (6, 6), [(3, 0, 1, 0), (3, 0, 1, 0)]),
        (SLOW_HOST, 9.25, (6, 6), [(3, 0, 0, 0.25), (3, 0, 0, 0.25)]),
    ],
    ids=["even", "uneven", "far", "slow-host"],
)
def test_each_cause(
    rows: Sequence[Sequence[Event]],
    makespan: float,
    busy: tuple[float, float],
    causes: list[tuple[float, ...]],
    tmp_path: Path,
) -> None:
    analysis = analysed(tmp_path, rows)
    assert analysis.makespan == pytest.approx(makespan / 1000)
    for bubble, computes, expected in zip(analysis.idle, busy, causes, strict=True):
        causes_found = (
            bubble.causes.warmup_and_drain,
            bubble.causes.imbalance,
            bubble.causes.transfers,
            bubble.causes.overhead,
        )
        assert bubble.busy == pytest.approx(computes / 1000)
        assert causes_found == pytest.approx([cause / 1000 for cause in expected], abs=1e-9)


def test_a_hop_is_measured_if_the_message_was_waited_for(tmp_path: Path) -> None:
    assert analysed(tmp_path, FAR).times.hops == pytest.approx({(0, 1): 0.0005})


def test_a_schedule_that_trains_nothing_is_split_as_well(tmp_path: Path) -> None:
    schedule = build("forward", 2, 2)
    rows = milliseconds("0F0 0 1, 0SEND_F0 1 1, 0F1 1 2, 0SEND_F1 2 2", "1RECV_F0 0 1, 1F0 1 2, 1RECV_F1 2 2, 1F1 2 3")
    analysis = analyse_run(read_run(write_run(tmp_path / "run", schedule, {0: rows})))
    assert [bubble.causes.warmup_and_drain for bubble in analysis.idle] == pytest.approx([0.001, 0.001])


_SECONDS = st.floats(1e-6, 1.0)


@given(st.data())
def test_causes_add_up_to_the_idle_time_and_none_is_negative(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v"]))
    ranks = data.draw(st.integers(1, 3))
    schedule = build(name, ranks, ranks * data.draw(st.integers(2, 3)))
    stages = schedule.stages
    times = Times(
        *(data.draw(st.lists(_SECONDS, min_size=stages, max_size=stages)) for _ in range(3)), hop=data.draw(_SECONDS)
    )
    steps = []
    for number in range(2):
        late = data.draw(_SECONDS)
        rows = rows_of(schedule, times, noise=data.draw(st.floats(0, 1)), seed=number)
        computed = [[span for span in row if not span.action.kind.is_transfer] for row in rows]
        computed[-1] = [span._replace(start=span.start + late, end=span.end + late) for span in computed[-1]]
        events = tuple(map(tuple, computed))
        steps.append(MeasuredStep(number, 0.0, events, ((),) * ranks, (True,) * ranks, (None,) * ranks, ((),) * ranks))
    simulated = SimulatedIdleTimes.from_measured_times(schedule, measured_times(steps, schedule, None))
    bubbles = [idle_of_step(step, simulated) for step in steps]
    for bubble in [idle for step in bubbles for idle in step] + list(mean_idle(bubbles)):
        causes = bubble.causes
        assert bubble.busy + sum(astuple(causes)) == pytest.approx(bubble.makespan, rel=1e-12)
        assert min(causes.warmup_and_drain, causes.imbalance, causes.transfers, causes.overhead) >= 0
