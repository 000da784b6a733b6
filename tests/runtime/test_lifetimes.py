"""Nothing lives longer than the schedule needs it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipegraph.runtime.executor import Executor
from pipegraph.runtime.processes.group import ConnectionLost
from pipegraph.runtime.step_state import StepState
from pipegraph.runtime.transport.sends import LARGE, SMALL_BYTES, GlooSends, NcclSends, PendingSend
from pipegraph.schedule import Action, Kind, What, lifetimes, lower
from tests.runtime.packages import batch, loss, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain


class Token:
    """Kept alive by a node of a graph."""


@pytest.mark.parametrize(("schedule", "peaks"), [("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1])])
def test_graphs_in_flight_are_the_schedules(schedule: str, peaks: list[int], tmp_path: Path) -> None:
    pipe = pipeline(write(chain(3), tmp_path / "chain"), schedule=schedule, microbatches=6, loss_fn=loss)
    alive: list[weakref.WeakSet[Token]] = [weakref.WeakSet() for _ in peaks]
    most = [0] * len(peaks)

    def count(index: int, output: torch.Tensor) -> None:
        token = Token()
        output.grad_fn.metadata["token"] = token
        alive[index].add(token)
        most[index] = max(most[index], len(alive[index]))

    for index, stage in pipe.stages.items():
        stage.register_forward_hook(lambda module, args, output, index=index: count(index, output))
    (x,) = batch(pipe.package.manifest, 6).values()
    pipe.step(x, target=torch.zeros(12))
    assert most == peaks
    gc.collect()
    assert [len(tokens) for tokens in alive] == [0, 0, 0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "looped-bfs", "dualpipe-v"])
def test_a_step_holds_after_each_action_what_the_schedule_still_needs(schedule: str, tmp_path: Path) -> None:
    pipe = pipeline(write(chain(4), tmp_path / "chain"), schedule=schedule, microbatches=4, loss_fn=loss)
    lowered = lower(pipe.schedule)
    keys_by_position: dict[tuple[int, int], set[tuple[object, ...]]] = {}

    def watch(executor: Executor, kind: Kind) -> None:
        do = executor._do[kind]

        def watched(active_executor: Executor, step: StepState, action: Action) -> None:
            do(active_executor, step, action)
            keys_by_position[executor.rank, executor.position] = {
                *((What.SAVED, stage, stage, microbatch) for stage, microbatch in step.saved),
                *(("sent", *key) for key in step.outgoing),
                *((What.VALUES, *key) for key, values in step.inputs.items() if values),
                *((What.GRADIENTS, *key) for key, values in step.gradients.items() if values),
            }

        executor._do[kind] = watched

    for executor in pipe._runner.executors.training_executors:
        for kind in tuple(executor._do):
            watch(executor, kind)
    (x,) = batch(pipe.package.manifest, 4).values()
    pipe.step(x, target=torch.zeros(8))
    assert len(keys_by_position) > 30
    rows = lifetimes(lowered)
    for (rank, position), live_keys in keys_by_position.items():
        alive = [part for part in rows[rank] if part.made <= position < part.last_read]
        expected: set[tuple[object, ...]] = set()
        for content, stages, microbatch, start, _ in alive:
            if content is What.SAVED:
                expected.add((content, *stages, microbatch))
            elif pipe.schedule.placement[stages[0]] == pipe.schedule.placement[stages[1]]:
                expected.add((content, stages[1], microbatch))
            elif not lowered.actions[rank][start].kind.is_transfer:  # what is received is the transport's
                expected.add(("sent", *stages, microbatch))
        assert live_keys == expected, lowered.actions[rank][position]


class SlowWork:
    """A send that is done when told so, and the group that makes it."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()

    def send(self, tensor: torch.Tensor, peer: int) -> SlowWork:
        return self


def test_a_send_holds_nobody_up_and_its_tensor_goes_when_it_is_done() -> None:
    """torch.distributed.pipelining holds sends to the end of the step, and computation waits for them (#172668)."""
    sends, works = GlooSends(), [SlowWork(), SlowWork()]
    tensors = [_sent(sends, work, LARGE) for work in works]
    assert [tensor() is None for tensor in tensors] == [False, False]
    works[0].done.set()
    _until(lambda: tensors[0]() is None)
    assert tensors[1]() is not None
    works[1].done.set()
    sends.finish()
    _until(lambda: tensors[1]() is None)


def test_small_sends_are_kept_until_they_are_many() -> None:
    sends, work = GlooSends(), SlowWork()
    work.done.set()
    tensors = [_sent(sends, work, LARGE - 4) for _ in range(SMALL_BYTES // LARGE)]
    assert [tensor() is None for tensor in tensors] == [False] * len(tensors)
    tensors.append(_sent(sends, work, LARGE - 4))
    _until(lambda: all(tensor() is None for tensor in tensors))
    last = _sent(sends, work, 12)
    sends.finish()
    _until(lambda: last() is None)


def _sent(sends: GlooSends, work: SlowWork, size: int) -> weakref.ref[torch.Tensor]:
    tensor = torch.zeros(size, dtype=torch.uint8)
    sends.add(PendingSend(work, 1, [tensor]))
    return weakref.ref(tensor)


def test_the_end_of_a_step_waits_no_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipegraph.runtime.transport.sends._WAKING_SECONDS", 0.0)
    sends, work = GlooSends(timeout=0.1), SlowWork()
    sends.add(PendingSend(work, 1, [torch.zeros(3)]))
    with pytest.raises(ConnectionLost, match=r"no answer within 0\.1 s"):
        sends.finish()
    work.done.set()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class PolledWork:
    """A send of NCCL: it says when it is done, and waiting for it would make computation wait."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        raise AssertionError("the end of a step waits for a send")

    def send(self, tensor: torch.Tensor, peer: int) -> PolledWork:
        return self


def test_a_send_that_outlives_its_step_is_kept_until_it_is_done() -> None:
    sends, works = NcclSends(), [PolledWork(), PolledWork()]
    tensors = []
    for work in works:
        tensor = torch.zeros(3)
        tensors.append(weakref.ref(tensor))
        sends.add(PendingSend(work, 1, [tensor]))
        del tensor
    works[0].done = True
    sends.finish()
    assert [tensor() is None for tensor in tensors] == [True, False]
    works[1].done = True
    sends.add(PendingSend(PolledWork(), 1, []))  # of the next step
    assert tensors[1]() is None


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_what_a_pipeline_holds_is_freed_with_it(kernels: str, tmp_path: Path) -> None:
    """At once: a collector may come late, and memory of a GPU does not call for one."""
    pipe = pipeline(write(chain(2), tmp_path / "chain"), "1f1b", kernels, microbatches=2, loss_fn=loss)
    (x,) = batch(pipe.package.manifest, 2).values()
    pipe.step(x, target=torch.zeros(len(x)))
    references = [weakref.ref(part) for part in (*pipe.stages.values(), *pipe.parameters())]
    gc.collect()
    gc.disable()
    try:
        del pipe
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()
