"""The host's time of a step from its call to its first forward: its batch is checked, agreed on, and cut.

python -m benchmarks.batch_path [--microbatches 8] [--rows 16] [--steps 400] [--json]

A model of four inputs and two stages, whose kernels are eager and tiny, takes steps in one process, in two processes
over gloo with a stage each, and in two data-parallel processes with both stages. An observer notes when the first F
begins on rank 0. A barrier before each step lets both ranks call it at about the same time. Times are medians over the
steps, in microseconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import pipegraph
from pipegraph.schedule import Action, Kind

WARMUP = 20
WIDTH = 8


class Model(nn.Module):
    """Two layers over four inputs of equally many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        x = self.first(x * mask.unsqueeze(-1) + positions.unsqueeze(-1))
        return self.second(x) + bias


def inputs(rows: int, length: int = 16) -> tuple[Tensor, ...]:
    shape = rows, length
    return (
        torch.rand(*shape, WIDTH),
        torch.ones(shape),
        torch.arange(length).expand(shape).contiguous(),
        torch.rand(*shape, WIDTH),
    )


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class FirstForward:
    """An observer that notes when the first F after a reset begins."""

    def __init__(self) -> None:
        self.begun: float | None = None

    def begin(self, rank: int, action: Action) -> None:
        if self.begun is None and action.kind is Kind.F:
            self.begun = time.perf_counter()

    def end(self, rank: int, action: Action, saved: Any) -> None:
        pass


@dataclass(frozen=True)
class BatchPathTime:
    """Microseconds from the call of a step to its first F: the median over steps, and the quartiles."""

    processes: str
    median: float
    lower: float
    upper: float


def measure(
    folder: str, microbatches: int, rows: int, steps: int, wait: Callable[[], object], replicas: int = 1
) -> list[float]:
    """Return the microseconds of each step. `wait` is called before each."""
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas,), mesh_dim_names=("dp_replicate",))
        pipe = pipegraph.Pipeline(
            f"{folder}/package", "interleaved-1f1b", microbatches, loss, kernels="eager", mesh=mesh
        )
    else:
        pipe = pipegraph.Pipeline(f"{folder}/package", "1f1b", microbatches, loss, kernels="eager")
    torch.manual_seed(0)  # the same batch on all ranks
    batch, target = inputs(rows), torch.zeros(rows, 16, WIDTH)
    forward, times = FirstForward(), []
    pipe.observe(forward)
    for step in range(WARMUP + steps):
        forward.begun = None
        wait()
        called = time.perf_counter()
        pipe.step(*batch, target=target)
        if step >= WARMUP and forward.begun is not None:
            times.append(1e6 * (forward.begun - called))
    return times


def measure_rank(rank: int, folder: str, microbatches: int, rows: int, steps: int, replicas: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{replicas}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    times = measure(folder, microbatches, rows, steps, dist.barrier, replicas)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    dist.barrier()
    os._exit(0)


def measure_processes(folder: str, microbatches: int, rows: int, steps: int, replicas: int) -> list[float]:
    """Return the microseconds of each step on rank 0 of two processes."""
    context = multiprocessing.get_context("spawn")
    arguments = folder, microbatches, rows, steps, replicas
    processes = [context.Process(target=measure_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    times: list[float] = json.loads(Path(folder, "times.json").read_text())
    return times


def summary(processes: str, times: list[float]) -> BatchPathTime:
    lower, _, upper = quantiles(times, n=4)
    return BatchPathTime(processes, median(times), lower, upper)


def main(
    microbatches: Annotated[int, typer.Option(min=1)] = 8,
    rows: Annotated[int, typer.Option(min=1)] = 16,
    steps: Annotated[int, typer.Option(min=10)] = 400,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        captured = pipegraph.capture(Model(), inputs(2))
        pipegraph.write_package(pipegraph.plan(captured, points=["second"]), f"{folder}/package")
        rows_by_processes = [
            summary("1", measure(folder, microbatches, rows, steps, lambda: None)),
            summary("2 along pp", measure_processes(folder, microbatches, rows, steps, 1)),
            summary("2 along dp_replicate", measure_processes(folder, microbatches, rows, steps, 2)),
        ]
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in rows_by_processes]))
        return
    table = Table("processes", "median, µs", "quartiles, µs", title=f"{microbatches} microbatches, 4 inputs")
    for entry in rows_by_processes:
        table.add_row(entry.processes, f"{entry.median:.0f}", f"{entry.lower:.0f} – {entry.upper:.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
