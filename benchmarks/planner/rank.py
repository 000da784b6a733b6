"""One of the two processes: runs every package in turns, and times steps and actions."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pipegraph
from benchmarks.planner.models import SUBJECTS
from pipegraph.runtime.measurements import ActionTimes

RANKS = 2


@dataclass(frozen=True)
class Options:
    """Options of a rank's process."""

    subject: str
    packages: tuple[Path, ...]
    schedule: str
    microbatches: int
    rounds: int
    cores: tuple[int, ...]


@dataclass(frozen=True)
class PackageTimes:
    """Times of one package: seconds of each step in the slower process, and medians of F, I and W by stage."""

    steps: list[float]
    actions: dict[tuple[int, str], float]


def main(rank: int, options: Options, port: int, results: Any) -> None:
    """Run the process of a rank. Rank 0 puts a list of `PackageTimes` into the queue."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    subject = SUBJECTS[options.subject]()
    repeated = [options.microbatches, *[1] * (subject.target.dim() - 1)]
    inputs = [tensor.repeat(options.microbatches, *[1] * (tensor.dim() - 1)) for tensor in subject.inputs]
    target = subject.target.repeat(*repeated)
    contenders = [_TimedPackage(package, options, subject.loss) for package in options.packages]
    for contender in contenders:
        contender.step(inputs, target)  # compiles
    _pin_threads({options.cores[rank]})
    for number in range(options.rounds + 1):
        order = list(contenders)
        random.Random(number).shuffle(order)
        for contender in order:
            contender.step(inputs, target, record=number > 0)
    measured = [timed_package.measured() for timed_package in contenders]
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()


class _TimedPackage:
    def __init__(self, package: Path, options: Options, loss: Any) -> None:
        self._pipe = pipegraph.Pipeline(package, options.schedule, options.microbatches, loss)
        self._times = ActionTimes(torch.device("cpu"))
        self._steps: list[float] = []

    def step(self, inputs: list[Any], target: Any, record: bool = False) -> None:
        if record and not self._steps:
            self._pipe.observe(self._times)
        for parameter in self._pipe.parameters():
            parameter.grad = None
        dist.barrier()
        start = time.perf_counter()
        self._pipe.step(*inputs, target=target)
        (slowest, *_) = sorted(self._pipe.gather([time.perf_counter() - start]), reverse=True)
        if record:
            self._steps += slowest

    def measured(self) -> PackageTimes:
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, {(stage, kind.value): s for (stage, kind), s in self._times.medians().items()})
        return PackageTimes(self._steps, {key: value for medians in every for key, value in medians.items()})


def _pin_threads(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)
