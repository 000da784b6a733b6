"""Observers see every action; times and memory are made of that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipegraph import Pipeline
from pipegraph.package import Package
from pipegraph.runtime.measurements import HISTORY_LENGTH, ActionTimes, NestedObservers, SavedBytes
from pipegraph.schedule import Action, Kind, lower
from tests.runtime import ranks
from tests.runtime.packages import batch, loss, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain

STAGES, MICROBATCHES = 2, 4


class Record:
    """What was seen, in order: (begins, rank, action, whether something is saved)."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, int, Action, bool]] = []

    def begin(self, rank: int, action: Action) -> None:
        self.seen.append((True, rank, action, False))

    def end(self, rank: int, action: Action, saved: Any) -> None:
        self.seen.append((False, rank, action, saved is not None))

    def actions_of(self, rank: int) -> list[tuple[Action, bool]]:
        """The actions of a rank, each with whether something was saved when it ended; they do not overlap."""
        rows = [(begins, action, saved) for begins, event_rank, action, saved in self.seen if event_rank == rank]
        assert [begins for begins, _, _ in rows] == [True, False] * (len(rows) // 2)
        assert [action for begins, action, _ in rows if begins] == [action for begins, action, _ in rows if not begins]
        return [(action, saved) for begins, action, saved in rows if not begins]


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package.open(write(chain(STAGES, width=16), tmp_path / "chain"))


def step(pipe: Pipeline) -> None:
    (x,) = batch(pipe.package.manifest, pipe.schedule.microbatches).values()
    pipe.step(x, target=torch.zeros(len(x)))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_every_action_is_seen(package: Package, schedule: str) -> None:
    pipe, record = pipeline(package, schedule, "eager", microbatches=MICROBATCHES, loss_fn=loss), Record()
    pipe.observe(record)
    step(pipe)
    manifest = package.manifest
    lowered = lower(pipe.schedule, manifest.edges(), manifest.gradient_edges())
    for rank, actions in enumerate(lowered.actions):
        observations = record.actions_of(rank)
        assert sorted(map(str, actions)) == sorted(str(action) for action, _ in observations)
        computed = [(action, saved) for action, saved in observations if not action.kind.is_transfer]
        assert [action for action, _ in computed] == [action for action in actions if not action.kind.is_transfer]
        assert all(saved == (action.kind in (Kind.F, Kind.I)) for action, saved in computed)
        for previous, (action, _) in zip([None, *observations], observations, strict=False):
            if action.kind in (Kind.B, Kind.I) and rank < STAGES - 1:  # its gradient was waited for right before
                assert previous is not None and str(previous[0]) == f"{action.stage}RECV_B{action.microbatch}"


def test_observers_come_and_go(package: Package) -> None:
    pipe = pipeline(package, "1f1b", microbatches=MICROBATCHES, loss_fn=loss)
    always, steps_alone = Record(), Record()
    handle = pipe.observe(always)
    (x,) = batch(package.manifest, MICROBATCHES).values()
    with pipe.observe(steps_alone, evals=False):
        pipe.evaluate(x)
        assert steps_alone.seen == []
        assert {action.kind for action, _ in always.actions_of(0)} == {Kind.F, Kind.SEND_F}
        always.seen.clear()
        step(pipe)
        assert always.seen == steps_alone.seen != []
    always.seen.clear()
    steps_alone.seen.clear()
    step(pipe)
    assert always.seen
    assert steps_alone.seen == []
    handle.remove()
    always.seen.clear()
    step(pipe)
    assert always.seen == []


def test_the_first_observer_begins_first_and_ends_last() -> None:
    calls: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self, rank: int, action: Action) -> None:
            calls.append(f"{self.name} begins")

        def end(self, rank: int, action: Action, saved: Any) -> None:
            calls.append(f"{self.name} ends")

    observers = NestedObservers([Named("outer"), Named("inner")])
    observers.begin(0, Action(0, Kind.F, 0))
    observers.end(0, Action(0, Kind.F, 0), None)
    assert calls == ["outer begins", "inner begins", "inner ends", "outer ends"]


def test_times_are_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.0, 4.0, 10.0, 12.0, 20.0, 27.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    times = ActionTimes(torch.device("cpu"))
    for microbatch in range(3):
        times.begin(0, Action(0, Kind.F, microbatch))
        times.end(0, Action(0, Kind.F, microbatch), None)
    times.begin(1, Action(1, Kind.W, 0))
    times.end(1, Action(1, Kind.W, 0), None)
    assert times.seconds() == {(0, Kind.F): [1.0, 3.0, 2.0], (1, Kind.W): [7.0]}
    assert times.medians() == {(0, Kind.F): 2.0, (1, Kind.W): 7.0}


def test_times_of_a_long_run_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    times = ActionTimes(torch.device("cpu"))
    for microbatch in range(2 * HISTORY_LENGTH):
        times.begin(0, Action(0, Kind.F, microbatch))
        times.end(0, Action(0, Kind.F, microbatch), None)
    assert len(times.seconds()[0, Kind.F]) == HISTORY_LENGTH
    assert times.end_step().spans == {}


def test_a_step_says_how_long_each_rank_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.0, 101.0, 101.0, 109.0, 109.0, 112.0, 120.0, 127.0, 129.0, 130.0, 132.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    times = ActionTimes(torch.device("cpu"))
    times.begin_step()
    for rank, action in ((0, "0F0"), (0, "0RECV_B0"), (0, "0B0"), (1, "1F0")):
        times.begin(rank, Action.parse(action))
        times.end(rank, Action.parse(action), None)
    step_times = times.end_step()
    assert [(str(span.action), span.begin, span.end) for span in step_times.spans[0]] == [
        ("0F0", 0.0, 1.0),
        ("0RECV_B0", 1.0, 9.0),
        ("0B0", 9.0, 12.0),
    ]
    assert (step_times.busy(0), step_times.busy(1), step_times.busy(2)) == (4.0, 7.0, 0)
    times.begin_step()
    times.begin(0, Action(0, Kind.F, 0))
    times.end(0, Action(0, Kind.F, 0), None)
    assert times.end_step().busy(0) == 2.0
    assert times.end_step().spans == {}
    assert times.medians()[0, Kind.F] == 1.5


class Gpu:
    """Its events, which take 5 ms each, and how many of them it has passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded = self.passed = self.alive = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                gpu.alive += 1

            def __del__(self) -> None:
                gpu.alive -= 1

            def record(self) -> None:
                self.number = gpu.recorded
                gpu.recorded += 1

            def query(self) -> bool:
                return self.number < gpu.passed

            def elapsed_time(self, end: Event) -> float:
                assert self.query()
                assert end.query()
                return 5.0 * (end.number - self.number)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def synchronize(self, device: torch.device) -> None:
        self.passed = self.recorded


def test_events_are_dropped_once_the_gpu_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, times = Gpu(monkeypatch), ActionTimes(torch.device("cuda"))
    times.begin_step()
    for microbatch in range(100):
        times.begin(0, Action(0, Kind.F, microbatch))
        times.end(0, Action(0, Kind.F, microbatch), None)
        gpu.passed = max(0, gpu.recorded - 6)
    assert gpu.alive <= 9
    assert times.end_step().busy(0) == pytest.approx(0.5)
    assert gpu.alive == 0
    assert times.seconds() == {(0, Kind.F): [0.005] * 100}


def test_times_of_a_gpu_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, times = Gpu(monkeypatch), ActionTimes(torch.device("cuda"))
    times.begin(0, Action(0, Kind.B, 0))
    times.end(0, Action(0, Kind.B, 0), None)
    assert (gpu.recorded, gpu.passed) == (2, 0)
    assert times.seconds() == {(0, Kind.B): [0.005]}


def saved_bytes(package: Package, schedule: str, microbatches: int, kernels: str = "eager") -> list[int | None]:
    pipe = pipeline(package, schedule, kernels, microbatches=microbatches, loss_fn=loss)
    (x,) = batch(package.manifest, microbatches).values()
    target = torch.zeros(len(x))
    state = [tensor for stage in pipe.stages.values() for tensor in stage.parameters()]
    saved = SavedBytes([*state, x, target])
    pipe.observe(saved)
    pipe.step(x, target=target)
    return [saved.peak(rank) for rank in range(pipe.schedule.ranks)]


def test_saved_bytes_are_those_of_the_microbatches_in_flight(package: Package) -> None:
    microbatch_bytes = saved_bytes(package, "gpipe", 1)
    assert all(microbatch_bytes)
    assert saved_bytes(package, "gpipe", 3) == [3 * count for count in microbatch_bytes if count]
    assert saved_bytes(package, "1f1b", 5) == [2 * (microbatch_bytes[0] or 0), microbatch_bytes[1]]


def test_what_autograd_saves_is_not_known(package: Package) -> None:
    assert saved_bytes(package, "1f1b", 2, "autograd") == [None, None]


def waiting(rank: int, folder: str) -> tuple[float, float, list[list[float]]]:
    """The longest RECV_F and F of rank 1, whose inputs come late, and what the ranks gather."""
    pipe = pipeline(folder, "gpipe", microbatches=2, loss_fn=loss)
    if rank == 0:
        pipe.stages[0].register_forward_pre_hook(lambda *_: time.sleep(0.2))
    times = ActionTimes(torch.device("cpu"))
    pipe.observe(times)
    step(pipe)
    durations = times.seconds()
    longest = [max(durations.get((1, kind), [0.0])) for kind in (Kind.RECV_F, Kind.F)]
    return longest[0], longest[1], pipe.gather([float(rank), 7.0])


def test_a_wait_is_the_receives_and_not_the_forwards(package: Package) -> None:
    (_, _, gathered), (received, forward, also) = ranks.run(waiting, STAGES, str(package.path))
    assert received > 0.15
    assert forward < 0.15
    assert gathered == also == [[0.0, 7.0], [1.0, 7.0]]


def test_a_process_by_itself_gathers_its_own(package: Package) -> None:
    assert pipeline(package, "1f1b", loss_fn=loss).gather([1.0, 2.0]) == [[1.0, 2.0]]
