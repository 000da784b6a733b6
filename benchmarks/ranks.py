"""What a runtime adds to a schedule: ranks whose kernels sleep instead of computing, so that no core is missing.

python benchmarks/ranks.py [--ranks 8] [--microbatches 16] [--milliseconds 20] [--rounds 3] [--json]

Every schedule by name under this project's runtime, and torch.distributed.pipelining's classes under its own with
modules that sleep the same, over gloo, against `simulate`. All stand in the same processes and take turns step by
step; ratios are medians over rounds. A rank sleeps equally long under every schedule: where it holds two stages, F, I
and W of each take `--milliseconds`, and twice that where it holds one. Stage 0 has no input gradient: its I takes no
time, and its W that of both. Processes ask for real-time priority, so that a sleeper wakes in time on a machine with
other work.

Then the same step with empty kernels: what the runtime itself takes for an action.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pipegraph
from pipegraph.kernels import Forward
from pipegraph.schedule import Times, build, names, simulate
from pipegraph.schedule.recipes import trains

ROWS = 2
BASELINE = "Interleaved1F1B"
TORCH = {  # its class, the schedule of ours that is the same
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    BASELINE: "interleaved-1f1b",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}


@dataclass(frozen=True)
class Setting:
    """What every process is told."""

    ranks: int
    microbatches: int
    seconds: float
    rounds: int
    width: int
    schedules: tuple[str, ...]
    folder: str

    def chunks(self, schedule: str) -> int:
        """How many stages a rank holds."""
        return build(schedule, self.ranks, self.microbatches).stages // self.ranks

    def package(self, schedule: str) -> str:
        return f"{self.folder}/{self.chunks(schedule) * self.ranks}"

    def of_stage(self, schedule: str) -> float:
        """Seconds of each of F, I and W."""
        return self.seconds * 2 / self.chunks(schedule)

    def simulated(self, schedule: str) -> float:
        built, seconds = build(schedule, self.ranks, self.microbatches), self.of_stage(schedule)
        stages = built.stages
        rest = [seconds] * (stages - 1)
        times = Times([seconds, *rest], [0.0, *rest], [2 * seconds, *rest])
        return simulate(built, times).makespan


@dataclass(frozen=True)
class Row:
    runtime: str
    schedule: str
    simulated: float
    """seconds of a step"""
    measured: float
    """likewise, median"""
    over_simulated: float
    """measured ÷ simulated, median"""
    baseline_over: float | None
    """torch's Interleaved1F1B ÷ this one, median over rounds"""


@dataclass(frozen=True)
class Overhead:
    """Of the runtime itself, for each action that computes: F, I, W or B and the transfers that belong to it."""

    schedule: str
    one_process: float
    """seconds, all ranks in one process"""
    processes: float
    """seconds of the main thread's CPU on a rank of its own, transfers over gloo included; the most of all ranks"""


class SleepingKernels:
    """Kernels of one stage that take their time and give zeros."""

    def __init__(self, seconds: float, input_gradients: Sequence[bool]) -> None:
        self._forward, self._both, self._input_gradients = seconds, 2 * seconds, input_gradients
        self._input = seconds if any(input_gradients) else 0.0

    def begin(self) -> None:
        pass

    def retrace(self) -> None:
        pass

    def prepare(self, *_: Any, **__: Any) -> None:
        pass

    def forward(
        self, inputs: Sequence[Any], *, target: Any = None, with_loss: bool = False, differentiable: bool = True
    ) -> Forward:
        _sleep(self._forward)
        output = torch.zeros_like(inputs[0])
        return Forward((output,), output[0, 0] if with_loss else None, output if differentiable else None)

    def backward(self, saved: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        _sleep(self._both)
        return self._gradients(saved)

    def input_backward(self, saved: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        _sleep(self._input)
        return self._gradients(saved)

    def weight_backward(self, saved: Tensor) -> None:
        _sleep(self._both - self._input)

    def _gradients(self, saved: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(torch.zeros_like(saved) if wanted else None for wanted in self._input_gradients)


class SleepingInput(torch.autograd.Function):
    """F and I."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _sleep(seconds)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return torch.zeros_like(gradient), None


class SleepingWeight(torch.autograd.Function):
    """W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return gradient, None


class SleepingStage(nn.Module):
    """A stage for torch's runtime, whose graph it divides into I and W itself."""

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = SleepingInput.apply(x, self.seconds)  # type: ignore[no-untyped-call]
        both = 1 if x.requires_grad else 2
        weight: Tensor = SleepingWeight.apply(self.weight, both * self.seconds)  # type: ignore[no-untyped-call]
        return made + weight


def _sleep(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


def ours(setting: Setting, schedule: str, seconds: float) -> tuple[pipegraph.Pipeline, Callable[[], Any]]:
    """A pipeline of ours, and its step."""
    pipe = pipegraph.Pipeline(
        setting.package(schedule),
        schedule=schedule,
        microbatches=setting.microbatches,
        loss_fn=lambda output, target: output.sum(),
        kernels=lambda stage, inputs, outputs, loss: SleepingKernels(seconds, inputs),
    )
    batch = torch.zeros(setting.microbatches * ROWS, setting.width)
    return pipe, lambda: pipe.step(batch)


def theirs(setting: Setting, name: str) -> Callable[[], Any]:
    """The step of torch's schedule class of this name."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    built, rank = build(TORCH[name], setting.ranks, setting.microbatches), dist.get_rank()
    stages = [
        PipelineStage(
            SleepingStage(setting.of_stage(TORCH[name]), setting.width), index, built.stages, torch.device("cpu")
        )
        for index, place in enumerate(built.placement)
        if place == rank
    ]
    kind = get_schedule_class(name)
    held: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    schedule = kind(held, setting.microbatches, loss_fn=lambda output, target: output.sum())
    batch = torch.zeros(setting.microbatches * ROWS, setting.width)
    inputs = (batch,) if built.placement[0] == rank else ()
    last = {"target": batch} if built.placement[-1] == rank else {}
    return lambda: schedule.step(*inputs, **last)


def measure(rank: int, setting: Setting) -> None:
    """One process: steps of every contender in turns. Rank 0 writes what they took."""
    with contextlib.suppress(PermissionError):  # else a sleeper is woken when the machine's other work leaves a core
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    torch.set_num_threads(1)
    store = dist.FileStore(f"{setting.folder}/store", setting.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.ranks)
    pipes, steps = [], {}
    for name in setting.schedules:
        pipe, steps["pipegraph", name] = ours(setting, name, setting.of_stage(name))
        pipes.append(pipe)
    for name in TORCH:
        steps["torch", name] = theirs(setting, name)
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for turn in range(setting.rounds + 1):
        for key, step in steps.items():
            seconds = _together(step, setting.ranks)
            if turn:  # the first one warms up
                taken[key].append(seconds)
    overhead = {}
    for name in setting.schedules:
        pipe, step = ours(setting, name, 0.0)
        pipes.append(pipe)
        actions = len(pipe.schedule.actions[rank])
        overhead[name] = _most(min(_cpu(step) for _ in range(10)) / actions, setting.ranks)
    if rank == 0:
        found = {"taken": [(*key, seconds) for key, seconds in taken.items()], "overhead": overhead}
        Path(setting.folder, "measured.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # hundreds of idle connections need no tidy end


def _together(step: Callable[[], Any], ranks: int) -> float:
    """Seconds from the first start of a rank to the last end: their clock is the machine's."""
    dist.barrier()
    start = time.monotonic()
    step()
    end = time.monotonic()
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, (start, end))
    return float(max(end for _, end in every) - min(start for start, _ in every))


def _cpu(step: Callable[[], Any]) -> float:
    start = time.thread_time()
    step()
    return time.thread_time() - start


def _most(seconds: float, ranks: int) -> float:
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, seconds)
    return float(max(every))


def write_packages(setting: Setting) -> None:
    """One package for each number of stages: a chain of layers, whose kernels sleep."""
    for schedule in {setting.package(name): name for name in (*setting.schedules, *TORCH.values())}.values():
        stages = setting.chunks(schedule) * setting.ranks
        model = nn.Sequential(*(nn.LayerNorm(setting.width) for _ in range(stages)))
        captured = pipegraph.capture(model, args=(torch.zeros(ROWS, setting.width),))
        pipegraph.write_package(pipegraph.plan(captured, stages=stages, balance="uniform"), setting.package(schedule))


def rows(setting: Setting, taken: dict[tuple[str, str], list[float]]) -> list[Row]:
    baseline = taken["torch", BASELINE]
    found = []
    for (runtime, name), seconds in taken.items():
        simulated = setting.simulated(TORCH.get(name, name) if runtime == "torch" else name)
        ratio = median(theirs / mine for theirs, mine in zip(baseline, seconds, strict=True))
        measured = median(seconds)
        found.append(Row(runtime, name, simulated, measured, measured / simulated, ratio))
    return found


def main(
    ranks: int = 8,
    microbatches: int = 16,
    milliseconds: Annotated[float, typer.Option(help="F, I and W of a stage, where a rank holds two.")] = 20.0,
    rounds: int = 3,
    width: Annotated[int, typer.Option(help="Floats in a row of what crosses; a microbatch has two rows.")] = 256,
    schedule: Annotated[list[str] | None, typer.Option(help="Ours; may be given several times. [default: all]")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compare runtimes by ranks that sleep."""
    chosen = tuple(schedule or (name for name in names() if trains(name)))
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(ranks, microbatches, milliseconds / 1000, rounds, width, chosen, folder)
        write_packages(setting)
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=measure, args=(rank, setting), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = json.loads(Path(folder, "measured.json").read_text())
        torch.set_num_threads(1)
        alone = {}
        for name in chosen:
            pipe, step = ours(setting, name, 0.0)
            alone[name] = min(_cpu(step) for _ in range(10)) / sum(map(len, pipe.schedule.actions))
    measured = rows(setting, {(runtime, name): seconds for runtime, name, seconds in found["taken"]})
    overheads = [Overhead(name, alone[name], found["overhead"][name]) for name in chosen]
    if as_json:
        given = {key: value for key, value in asdict(setting).items() if key != "folder"}
        said = {"rows": list(map(asdict, measured)), "overheads": list(map(asdict, overheads))}
        print(json.dumps({"schema_version": 1, **given, **said}, indent=2))
        return
    show(setting, measured, overheads)


def show(setting: Setting, measured: Sequence[Row], overheads: Sequence[Overhead]) -> None:
    title = f"{setting.ranks} sleeping ranks, {setting.microbatches} microbatches"
    table = Table("runtime", "schedule", "simulated", "step", "÷ simulated", f"torch {BASELINE} ÷", title=title)
    for row in measured:
        figures = f"{row.simulated:.3f} s", f"{row.measured:.3f} s", f"{row.over_simulated:.4f}"
        table.add_row(row.runtime, row.schedule, *figures, f"{row.baseline_over:.3f}")
    console = Console(width=110)
    console.print(table)
    table = Table("schedule", "in one process", "a rank's CPU", title="microseconds per action, kernels empty")
    for overhead in overheads:
        table.add_row(overhead.schedule, f"{overhead.one_process * 1e6:.1f}", f"{overhead.processes * 1e6:.1f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
