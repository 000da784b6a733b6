"""One of the four processes: runs each plan with its own kernels, then the four in turns with kernels that sleep."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pipegraph
from benchmarks.joint_plan.models import SUBJECTS
from benchmarks.joint_plan.plans import DEVICES, FourthPlan
from benchmarks.joint_plan.sleeping import sleeping
from benchmarks.step.stopwatch import Stopwatch
from pipegraph.kernels.sharded import local
from pipegraph.package import Package
from pipegraph.runtime.measurements import SavedBytes
from pipegraph.runtime.processes.rank_grid import grid_of
from pipegraph.runtime.processes.world import make_mesh
from pipegraph.schedule import Kind

_TIMES = 9  # that kernels of each plan run alone


@dataclass(frozen=True)
class MeasuredPlan:
    """What a plan took.

    Attributes:
        steps: seconds of each step with sleeping kernels.
        memory: bytes of each process: parameters, gradients, AdamW's moments, and what is kept for backwards at most.
        seconds: processor seconds of F and B of each process.
    """

    steps: list[float]
    memory: list[int]
    seconds: list[tuple[float, float]]


def main(
    rank: int, subject: str, plans: Sequence[FourthPlan], kernels: str, rounds: int, port: int, results: Any
) -> None:
    """Run the process of a rank. Rank 0 puts a list of `MeasuredPlan` into the queue."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(DEVICES), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    runs = [_Run(subject, plan, kernels) for plan in plans]
    for number in range(_TIMES):
        for _, run in _shuffled(runs, number):
            run.run_alone()
    for run in runs:
        run.sleep()
    steps: list[list[float]] = [[] for _ in plans]
    for number in range(rounds + 1):
        for index, run in _shuffled(runs, number):
            seconds = run.step()
            steps[index] += [seconds] if number else []
    gathered: list[Any] = [None] * DEVICES
    dist.all_gather_object(gathered, [(run.held, run.seconds) for run in runs])
    if rank == 0:
        rows = zip(steps, zip(*gathered, strict=True), strict=True)
        results.put(
            [
                MeasuredPlan(plan_steps, [memory for memory, _ in figures], [took for _, took in figures])
                for plan_steps, figures in rows
            ]
        )
    dist.barrier()
    dist.destroy_process_group()


def _shuffled(runs: Sequence[_Run], number: int) -> list[tuple[int, _Run]]:
    """Return the plans with their numbers, in an order that is the same in all processes."""
    order = list(enumerate(runs))
    random.Random(number).shuffle(order)
    return order


class _Run:
    """A plan: measured once with its kernels, and from then on with kernels that sleep as long as these took."""

    def __init__(self, subject: str, plan: FourthPlan, kernels: str) -> None:
        self._subject, self._package = SUBJECTS[subject](), Package.open(plan.package)
        prediction = self._package.manifest.prediction
        assert prediction is not None
        self._microbatches = plan.microbatches
        grid = grid_of(prediction.ranks, prediction.mesh)
        self._mesh = make_mesh(grid, "cpu", 600) if prediction.mesh else None
        self._tp = prediction.mesh.get("tp", 1)
        torch.manual_seed(0)
        self._inputs, self._target = self._subject.batch(plan.rows * plan.microbatches)
        self._exchanges = plan.exchanges
        self._real = self._pipeline(kernels)
        (self._stage,) = self._real.stages
        self.held = self._bytes_held()
        self._watch = Stopwatch(self._real, keeps=True)
        self._real.step(self._inputs, target=self._target)
        self._watch.detach()
        self._alone: list[float] = []

    def run_alone(self) -> None:
        """Run F and B of a step's microbatches, one process after the other: each stands for a separate device.

        Those along tp, which wait for each other, run together.
        """
        for turn in range(0, DEVICES, self._tp):
            dist.barrier()
            if turn <= dist.get_rank() < turn + self._tp:
                self._alone.append(self._watch.alone(divided=False).processor)
        dist.barrier()

    def sleep(self) -> None:
        """From now on, sleep as long as the kernels took."""
        forward, backward = (self._watch.sums()[self._stage, kind].processor for kind in "FB")
        part = median(self._alone) / self._microbatches / (forward + backward)
        self.seconds = part * forward, part * backward
        exchanged = zip((Kind.F, Kind.B), self.seconds, self._exchanges[self._stage], strict=True)
        took = {kind: kernel_seconds + exchange for kind, kernel_seconds, exchange in exchanged}
        self._sleeping = self._pipeline(sleeping(self._real.package.manifest, self._stage, took))
        del self._real, self._watch

    def step(self) -> float:
        """Return the seconds of a step without gradients of earlier ones, until all processes are done."""
        for parameter in self._sleeping.parameters():
            parameter.grad = None
        dist.barrier()
        start = time.perf_counter()
        self._sleeping.step(self._inputs, target=self._target)
        dist.barrier()
        return time.perf_counter() - start

    def _pipeline(self, kernels: Any) -> pipegraph.Pipeline:
        return pipegraph.Pipeline(
            self._package,
            "1f1b",
            self._microbatches,
            self._subject.loss,
            kernels=kernels,
            mesh=self._mesh,
            tp_plan=self._subject.tp_plan if self._tp > 1 else None,
            timeout=600,
        )

    def _bytes_held(self) -> int:
        """Return the bytes that this process holds: with what is kept for backwards at most, and an optimizer."""
        pipe = self._real
        optimizer = torch.optim.AdamW(pipe.parameters())
        state = [*pipe.parameters(), *(buffer for stage in pipe.stages.values() for buffer in stage.buffers())]
        saved = SavedBytes([*map(local, state), self._inputs, self._target])
        handle = pipe.observe(saved)
        pipe.step(self._inputs, target=self._target)
        handle.remove()
        optimizer.step()
        tensors = [*state, *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)]
        tensors += [
            tensor
            for parameter_state in optimizer.state.values()
            for tensor in parameter_state.values()
            if isinstance(tensor, Tensor)
        ]
        optimizer.zero_grad()
        return sum(local(tensor).nbytes for tensor in tensors) + (saved.peak(pipe.ranks[0]) or 0)
