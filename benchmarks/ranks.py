"""What a runtime adds to a schedule, measured on ranks whose kernels sleep: more ranks run than there are cores.

python -m benchmarks.ranks [--ranks 8] [--microbatches 16] [--milliseconds 20] [--rounds 3] [--alone] [--json]

Every named schedule runs under pipegraph's runtime, and torch.distributed.pipelining's classes run under torch's with
modules that sleep as long, over gloo; both are compared with `simulate`, and with a loop that only sleeps, sends,
receives and waits (`bare_gloo.py`): no runtime in Python can be nearer to `simulate` over gloo. All of them live in the
same processes and take turns step by step; ratios are medians over rounds. A rank sleeps equally long under every
schedule: if it holds two stages, F, I and W of each take `--milliseconds`; if it holds one, twice that. Stage 0 has no
input gradient: its I takes no time, and its W the time of both. With `--real-time` processes ask for real-time
priority, so that a sleeping rank wakes in time on a busy machine.

The same step with empty kernels shows what the runtime itself takes for an action.
"""

from __future__ import annotations

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
from torch import nn

import pipegraph
from benchmarks.bare_gloo import bare_step
from benchmarks.sleeping_stages import SleepingKernels, SleepingStage
from pipegraph.schedule import Action, Kind, Times, build, names, simulate
from pipegraph.schedule.recipes import trains

ALONE_HELP = "Without torch's classes."
REAL_TIME_HELP = "Ask for real-time priority, so that a rank wakes in time whatever else runs; it takes root."
ROWS = 2
BASELINE = "Interleaved1F1B"
TORCH = {  # torch's class → the equal schedule of pipegraph
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    BASELINE: "interleaved-1f1b",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}


@dataclass(frozen=True)
class SleepSetting:
    """Options that every process gets."""

    ranks: int
    microbatches: int
    seconds: float
    rounds: int
    width: int
    schedules: tuple[str, ...]
    alone: bool
    real_time: bool
    folder: str

    @property
    def peers(self) -> tuple[str, ...]:
        """Torch's classes that run too."""
        return () if self.alone else tuple(TORCH)

    def chunks(self, schedule: str) -> int:
        """Return how many stages a rank holds."""
        return build(schedule, self.ranks, self.microbatches).stages // self.ranks

    def package(self, schedule: str) -> str:
        return f"{self.folder}/{self.chunks(schedule) * self.ranks}"

    def stage_seconds(self, schedule: str) -> float:
        """Return the seconds of each of F, I and W of a stage."""
        return self.seconds * 2 / self.chunks(schedule)

    def simulated(self, schedule: str) -> float:
        built, seconds = build(schedule, self.ranks, self.microbatches), self.stage_seconds(schedule)
        stages = built.stages
        stage_times = [seconds] * (stages - 1)
        times = Times([seconds, *stage_times], [0.0, *stage_times], [2 * seconds, *stage_times])
        return simulate(built, times).makespan


@dataclass(frozen=True)
class StepRow:
    runtime: str
    schedule: str
    simulated: float
    """seconds of a step"""
    measured: float
    """seconds of a step, median over rounds"""
    over_simulated: float
    """measured ÷ simulated, median"""
    baseline_over: float | None
    """torch's Interleaved1F1B ÷ this contender, median over rounds"""


@dataclass(frozen=True)
class Overhead:
    """Time of the runtime itself per computing action: F, I, W or B, and the transfers that belong to it."""

    schedule: str
    one_process: float
    """seconds, with all ranks in one process"""
    processes: float
    """CPU seconds of a rank's main thread, with a process for each rank and transfers over gloo; the largest of all"""
    bare: float
    """the same without a runtime: what gloo takes"""


def pipegraph_step(
    setting: SleepSetting, schedule: str, seconds: float
) -> tuple[pipegraph.Pipeline, Callable[[], Any]]:
    """Return a pipeline of pipegraph, and a function that runs its step."""
    pipe = pipegraph.Pipeline(
        setting.package(schedule),
        schedule=schedule,
        microbatches=setting.microbatches,
        loss_fn=lambda output, target: output.sum(),
        kernels=lambda stage, inputs, outputs, loss: SleepingKernels(stage, seconds, inputs),
    )
    batch = torch.zeros(setting.microbatches * ROWS, setting.width)
    return pipe, lambda: pipe.step(batch)


def _bare_step(setting: SleepSetting, name: str, seconds: float) -> Callable[[], None]:
    schedule = build(name, setting.ranks, setting.microbatches)

    def sleep(action: Action) -> float:
        first = action.stage == 0
        return seconds * {Kind.I: not first, Kind.W: 1 + first, Kind.B: 2}.get(action.kind, 1)

    return bare_step(schedule, (ROWS, setting.width), sleep)


def torch_step(setting: SleepSetting, name: str) -> Callable[[], Any]:
    """Return a function that runs a step of torch's schedule class of this name."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    schedule, rank = build(TORCH[name], setting.ranks, setting.microbatches), dist.get_rank()
    stages = [
        PipelineStage(
            SleepingStage(setting.stage_seconds(TORCH[name]), setting.width),
            index,
            schedule.stages,
            torch.device("cpu"),
        )
        for index, place in enumerate(schedule.placement)
        if place == rank
    ]
    kind = get_schedule_class(name)
    argument: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    runtime = kind(argument, setting.microbatches, loss_fn=lambda output, target: output.sum())
    batch = torch.zeros(setting.microbatches * ROWS, setting.width)
    inputs = (batch,) if schedule.placement[0] == rank else ()
    last = {"target": batch} if schedule.placement[-1] == rank else {}
    return lambda: runtime.step(*inputs, **last)


def _take_real_time_priority() -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def measure(rank: int, setting: SleepSetting) -> None:
    """Run one process: steps of every contender in turns. Rank 0 writes their times."""
    if setting.real_time:
        _take_real_time_priority()
    torch.set_num_threads(1)
    store = dist.FileStore(f"{setting.folder}/store", setting.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.ranks)
    pipes, steps = [], {}
    for name in setting.schedules:
        pipe, steps["pipegraph", name] = pipegraph_step(setting, name, setting.stage_seconds(name))
        pipes.append(pipe)
    for name in setting.schedules:
        steps["bare gloo", name] = _bare_step(setting, name, setting.stage_seconds(name))
    for name in setting.peers:
        steps["torch", name] = torch_step(setting, name)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for turn in range(setting.rounds + 1):
        for key, step in steps.items():
            duration = _step_seconds(step, setting.ranks)
            if turn:  # the first one warms up
                seconds[key].append(duration)
    overhead = {}
    for name in setting.schedules:
        pipe, step = pipegraph_step(setting, name, 0.0)
        pipes.append(pipe)
        actions = len(pipe.schedule.actions[rank])
        calls = step, _bare_step(setting, name, 0.0)
        overhead[name] = [
            _largest(min(_cpu_seconds(call) for _ in range(10)) / actions, setting.ranks) for call in calls
        ]
    if rank == 0:
        result = {"seconds": [(*key, durations) for key, durations in seconds.items()], "overhead": overhead}
        Path(setting.folder, "measured.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # do not wait for hundreds of idle connections to close


def _step_seconds(step: Callable[[], Any], ranks: int) -> float:
    """Return the seconds from the first rank's start to the last rank's end; all ranks share the machine's clock."""
    dist.barrier()
    start = time.monotonic()
    step()
    end = time.monotonic()
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, (start, end))
    return float(max(end for _, end in every) - min(start for start, _ in every))


def _cpu_seconds(step: Callable[[], Any]) -> float:
    start = time.thread_time()
    step()
    return time.thread_time() - start


def _largest(seconds: float, ranks: int) -> float:
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, seconds)
    return float(max(every))


def _all_schedules(setting: SleepSetting) -> tuple[str, ...]:
    return (*setting.schedules, *(TORCH[name] for name in setting.peers))


def write_packages(setting: SleepSetting) -> None:
    """Write one package for each number of stages: a chain of layers, whose kernels will sleep."""
    for schedule in {setting.package(name): name for name in _all_schedules(setting)}.values():
        stages = setting.chunks(schedule) * setting.ranks
        model = nn.Sequential(*(nn.LayerNorm(setting.width) for _ in range(stages)))
        captured = pipegraph.capture(model, args=(torch.zeros(ROWS, setting.width),))
        pipegraph.write_package(pipegraph.plan(captured, stages=stages, balance="uniform"), setting.package(schedule))


def rows(setting: SleepSetting, times: dict[tuple[str, str], list[float]]) -> list[StepRow]:
    baseline = times.get(("torch", BASELINE))
    result = []
    for (runtime, name), seconds in times.items():
        simulated = setting.simulated(TORCH.get(name, name) if runtime == "torch" else name)
        ratio = (
            median(reference / step for reference, step in zip(baseline, seconds, strict=True)) if baseline else None
        )
        measured = median(seconds)
        result.append(StepRow(runtime, name, simulated, measured, measured / simulated, ratio))
    return result


def main(
    ranks: int = 8,
    microbatches: int = 16,
    milliseconds: Annotated[float, typer.Option(help="F, I and W of a stage, if a rank holds two.")] = 20.0,
    rounds: int = 3,
    width: Annotated[int, typer.Option(help="Floats per row of a boundary; a microbatch has two rows.")] = 256,
    schedule: Annotated[list[str] | None, typer.Option(help="May be given several times. [default: all]")] = None,
    alone: Annotated[bool, typer.Option("--alone", help=ALONE_HELP)] = False,
    real_time: Annotated[bool, typer.Option("--real-time", help=REAL_TIME_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compare runtimes on ranks that sleep."""
    if real_time:
        try:
            _take_real_time_priority()
        except PermissionError:
            raise SystemExit("--real-time takes a right that root has.\nTry: sudo, or without --real-time.") from None
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    chosen = tuple(schedule or (name for name in names() if trains(name)))
    with tempfile.TemporaryDirectory() as folder:
        setting = SleepSetting(
            ranks, microbatches, milliseconds / 1000, rounds, width, chosen, alone, real_time, folder
        )
        write_packages(setting)
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=measure, args=(rank, setting), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        result = json.loads(Path(folder, "measured.json").read_text())
        torch.set_num_threads(1)
        one_process = {}
        for name in chosen:
            pipe, step = pipegraph_step(setting, name, 0.0)
            one_process[name] = min(_cpu_seconds(step) for _ in range(10)) / sum(map(len, pipe.schedule.actions))
    measured = rows(setting, {(runtime, name): seconds for runtime, name, seconds in result["seconds"]})
    overheads = [Overhead(name, one_process[name], *result["overhead"][name]) for name in chosen]
    if as_json:
        options = {key: value for key, value in asdict(setting).items() if key != "folder"}
        tables = {"rows": list(map(asdict, measured)), "overheads": list(map(asdict, overheads))}
        print(json.dumps({"schema_version": 1, **options, **tables}, indent=2))
        return
    show(setting, measured, overheads)


def show(setting: SleepSetting, measured: Sequence[StepRow], overheads: Sequence[Overhead]) -> None:
    title = f"{setting.ranks} sleeping ranks, {setting.microbatches} microbatches"
    table = Table("runtime", "schedule", "simulated", "step", "÷ simulated", f"torch {BASELINE} ÷", title=title)
    for row in measured:
        figures = f"{row.simulated:.3f} s", f"{row.measured:.3f} s", f"{row.over_simulated:.4f}"
        table.add_row(row.runtime, row.schedule, *figures, f"{row.baseline_over:.3f}" if row.baseline_over else "–")
    console = Console(width=110)
    console.print(table)
    columns = "schedule", "in one process", "a rank's CPU", "bare gloo"
    table = Table(*columns, title="microseconds per action, kernels empty")
    for overhead in overheads:
        table.add_row(
            overhead.schedule,
            *(f"{seconds * 1e6:.1f}" for seconds in (overhead.one_process, overhead.processes, overhead.bare)),
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
