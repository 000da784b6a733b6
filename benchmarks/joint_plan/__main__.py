"""The command: `python -m benchmarks.joint_plan`."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.joint_plan.plans import FourthPlan
    from benchmarks.joint_plan.rank import MeasuredPlan

HARDWARE_HELP = "the profile, or what `pipegraph calibrate --threads 1 --ranks 4` wrote"
HEADERS = [
    "plan",
    "rows",
    "microbatches",
    "step predicted",
    "measured",
    "error",
    "memory predicted",
    "measured",
    "error",
]


def main(
    hardware: Annotated[str, typer.Option(help=HARDWARE_HELP)] = "cpu",
    subject: Annotated[str, typer.Option(help="llama or layers")] = "llama",
    balance: Annotated[str, typer.Option(help="time or measured")] = "measured",
    kernels: str = "inductor",
    batch: Annotated[int, typer.Option(help="rows of a step")] = 64,
    rows: Annotated[int, typer.Option(help="the fewest of a microbatch")] = 1,
    memory: Annotated[str, typer.Option(help="of each device, such as 150MiB")] = "",
    rounds: int = 9,
    markdown: bool = False,
) -> None:
    """Plan pp 4, pp 2 × dp 2, dp 4 and pp 2 × tp 2 under a limit of memory, and run them in turns.

    Four processes share the cores of this machine, which are fewer. So each plan runs with its own kernels first, for
    what a rank holds and the processor time of F and B, which one process runs after the other. Then all four run in
    turns with kernels that sleep for these times, and with real messages, reductions and waits.
    Exchanges along tp are not slept through: what they take is as predicted from the links of the profile.
    """
    from pipegraph.cost.hardware import Hardware
    from pipegraph.units import format_bytes, format_percent, format_seconds, parse_bytes

    os.environ["OMP_NUM_THREADS"] = "1"
    limit = parse_bytes(memory) if memory else None
    plans, measured = compare(subject, Hardware.load(hardware), balance, kernels, batch, rows, limit, rounds)
    lines = []
    for plan, measurement in zip(plans, measured, strict=True):
        step, peak_bytes = median(measurement.steps), max(measurement.memory)
        lines.append(
            [
                plan.name,
                str(plan.rows),
                str(plan.microbatches),
                format_seconds(plan.step),
                format_seconds(step),
                format_percent(plan.step / step - 1, signed=True),
                format_bytes(max(plan.memory)),
                format_bytes(peak_bytes),
                format_percent(max(plan.memory) / peak_bytes - 1, signed=True),
            ]
        )
    if markdown:
        for line in (HEADERS, ["---"] * len(HEADERS), *lines):
            print(f"| {' | '.join(line)} |")
    else:
        table = Table(*HEADERS)
        for line in lines:
            table.add_row(*line)
        Console(width=140).print(table)
    predicted = sorted(range(len(plans)), key=lambda index: plans[index].step)
    measured_order = sorted(range(len(plans)), key=lambda index: median(measured[index].steps))
    names = ", ".join(plans[index].name for index in measured_order)
    print(f"from the fastest: {names}; " + ("as predicted" if predicted == measured_order else "not as predicted"))


def compare(
    subject: str,
    hardware: object,
    balance: str,
    kernels: str,
    batch: int,
    rows: int,
    memory: float | None,
    rounds: int,
) -> tuple[Sequence[FourthPlan], Sequence[MeasuredPlan]]:
    """Return the four plans and what they took."""
    import torch
    from torch import multiprocessing

    from benchmarks.joint_plan.plans import DEVICES, write_plans
    from benchmarks.joint_plan.rank import main as run_rank

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pipegraph-joint-") as folder:
        plans = write_plans(subject, Path(folder), hardware, balance, batch, rows, memory)  # type: ignore[arg-type]
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        results = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (subject, plans, kernels, rounds, port, results)
        processes = multiprocessing.start_processes(run_rank, arguments, nprocs=DEVICES, join=False)
        while results.empty():
            processes.join(timeout=1)
        measured = results.get()
        while not processes.join():
            pass
    return plans, measured


if __name__ == "__main__":
    typer.run(main)
