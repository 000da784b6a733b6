"""Where the time of one of pipegraph's own steps goes beyond the limit."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.step.contenders import OwnPipeline
from pipegraph.schedule import Schedule, Times, simulate


class Stopwatch:
    """Times a pipeline's kernels and its waits for other ranks, until it is detached."""

    def __init__(self, pipeline: OwnPipeline) -> None:
        self.kernels: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.core: dict[tuple[int, str], list[float]] = defaultdict(list)
        """CPU seconds of the kernels: without the time that the core gave to other threads"""
        self.waited = 0.0
        # Private, because an observer sees actions, which contain more than their kernels.
        (executor,) = pipeline.pipe._runner.executors.own
        self._executor = executor
        self._kernels, self._transport = executor._kernels, executor._transport
        executor._kernels = {stage: _TimedKernels(made, stage, self) for stage, made in self._kernels.items()}
        executor._transport = _TimedTransport(self._transport, self)

    def detach(self) -> None:
        self._executor._kernels, self._executor._transport = self._kernels, self._transport


def mean(seconds: dict[tuple[int, str], list[float]]) -> dict[tuple[int, str], float]:
    """Return the mean seconds of one call, by stage and kind, of all processes. Collective."""
    mine = {key: sum(each) / len(each) for key, each in seconds.items() if each}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {key: figure for each in gathered for key, figure in each.items()}


def _sum(seconds: dict[tuple[int, str], list[float]]) -> float:
    return sum(map(sum, seconds.values()))


class _TimedKernels:
    def __init__(self, kernels: Any, stage: int, watch: Stopwatch) -> None:
        self.begin: Any = kernels.begin
        self.prepare: Any = kernels.prepare
        named = {"F": kernels.forward, "B": kernels.backward, "I": kernels.input_backward, "W": kernels.weight_backward}
        timed = {
            kind: self._timed(call, watch.kernels[stage, kind], watch.core[stage, kind]) for kind, call in named.items()
        }
        self.forward, self.backward, self.input_backward, self.weight_backward = timed.values()

    @staticmethod
    def _timed(call: Callable[..., Any], seconds: list[float], core: list[float]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, worked = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                core.append(time.thread_time() - worked)
                seconds.append(time.perf_counter() - start)

        return timed


class _TimedTransport:
    def __init__(self, transport: Any, watch: Stopwatch) -> None:
        self._transport, self._watch = transport, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def receive(self, transfer: Any, given: Any) -> Any:
        return _TimedReceive(self._transport.receive(transfer, given), self._watch)


class _TimedReceive:
    def __init__(self, receive: Any, watch: Stopwatch) -> None:
        self._receive, self._watch = receive, watch

    def ready(self) -> bool:
        return bool(self._receive.ready())

    def wait(self) -> Any:
        start = time.perf_counter()
        tensors = self._receive.wait()
        self._watch.waited += time.perf_counter() - start
        return tensors


@dataclass(frozen=True)
class Account:
    """Parts of the limit (1.0 = one ideal step). In every round they add up to step − 1; their medians nearly do."""

    kernels: float
    """CPU time in kernels of the mean rank − that of the limit: how much slower they are than torch.compile's"""
    preempted: float
    """time within kernels that the core gave to other threads and processes − the same of the limit"""
    imbalance: float
    """busy time of the busiest rank − that of the mean rank"""
    bubble: float
    """makespan of the schedule with the measured kernels and without transfers − busy time of the busiest rank"""
    interpreter: float
    """time of the busiest rank in neither a kernel nor a wait: the executor, and posting messages"""
    transfers: float
    """the rest: waits beyond the bubble, for messages and for kernels that are slower than on average"""

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def account(
    pipeline: OwnPipeline, step: Callable[[], float], limit: Callable[[], tuple[float, float]], rounds: int
) -> Account:
    """Divide the time of a step into parts: medians of some rounds. Collective: every process must call it.

    `limit` returns the seconds of a step, and the CPU seconds in it.
    """
    schedule: Schedule = pipeline.pipe.schedule
    found: list[Account] = []
    for _ in range(rounds):
        before = limit()
        watch = Stopwatch(pipeline)
        taken = step()
        watch.detach()
        kernels = mean(watch.kernels)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (_sum(watch.kernels), watch.waited, _sum(watch.core)))
        ideal, core = (sum(figures) / 2 for figures in zip(before, limit(), strict=True))
        busy = [each for each, _, _ in gathered]
        most = max(busy)
        alone = simulate(schedule, _times(schedule.stages, kernels)).makespan
        waited = gathered[busy.index(most)][1]
        interpreter = max(0.0, taken - most - waited)
        average, worked = (sum(column) / len(column) for column in (busy, [each for _, _, each in gathered]))
        parts = (worked - core, (average - worked) - (ideal - core), most - average, alone - most, interpreter)
        found.append(Account(*(part / ideal for part in (*parts, taken - ideal - sum(parts)))))
    return Account(*(median(column) for column in zip(*(asdict(each).values() for each in found), strict=True)))


def _times(stages: int, kernels: dict[tuple[int, str], float]) -> Times:
    """Return the times for the simulator, which takes B as I and W together."""
    f, i, w = ([kernels.get((stage, kind), 0.0) for stage in range(stages)] for kind in "FIW")
    whole = [kernels.get((stage, "B"), 0.0) for stage in range(stages)]
    return Times(f, i, [weight + both for weight, both in zip(w, whole, strict=True)])
