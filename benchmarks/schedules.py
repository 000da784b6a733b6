"""The gap of every named schedule to its lower bound, and what a search gains over it.

python benchmarks/schedules.py [--effort 0.2] [--json]

The settings are those that the Zero Bubble papers measured (8 ranks; seconds of F, I and W of a rank, and of a hop),
and the first of them with unequal stages. For each named schedule: its makespan ÷ the lower bound for its stages, and
the same for what `search` finds with the same placement and number of stages on a rank, and no more memory.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pipegraph.schedule import PLACEMENTS, Times, build, lower_bound, names, search, simulate
from pipegraph.schedule.recipes import trains

RANKS = 8
FIRST = "24 microbatches, 1.5 B"
SETTINGS = {
    FIRST: (24, 0.018522, 0.018086, 0.009337, 0.000601),
    "32 microbatches, 1.5 B": (32, 0.018513, 0.018086, 0.009331, 0.000626),
    "64 microbatches, 1.5 B": (64, 0.018546, 0.018097, 0.009321, 0.000762),
    "24 microbatches, 6.2 B": (24, 0.029718, 0.029444, 0.019927, 0.000527),
}
UNEQUAL = f"{FIRST}, stages 30 % up or down"


@dataclass(frozen=True)
class ScheduleRow:
    setting: str
    schedule: str
    stages: int
    peak_activations: int
    over_bound: float
    """the schedule's makespan ÷ lower bound"""
    searched_over_bound: float
    """makespan ÷ lower bound of what search finds within the schedule's memory"""
    gain: float
    """1 − searched makespan ÷ the schedule's makespan"""
    origin: str


def rows(setting: str, effort: float) -> list[ScheduleRow]:
    microbatches, *figures, hop = SETTINGS[FIRST if setting == UNEQUAL else setting]
    result = []
    for name in names():
        if not trains(name):
            continue
        schedule = build(name, RANKS, microbatches)
        chunks = schedule.stages // RANKS
        generator = random.Random(0)
        sizes = [1 + generator.uniform(-0.3, 0.3) * (setting == UNEQUAL) for _ in range(schedule.stages)]
        times = Times(*([figure / chunks * size for size in sizes] for figure in figures), hop=hop)
        timeline = simulate(schedule, times)
        bound = lower_bound(times, schedule.placement, microbatches)
        placement = next(name for name, at in PLACEMENTS.items() if at.places(RANKS, chunks) == schedule.placement)
        best = search(times, RANKS, microbatches, placement, max(timeline.peak_activations), effort)
        result.append(
            ScheduleRow(
                setting=setting,
                schedule=name,
                stages=schedule.stages,
                peak_activations=max(timeline.peak_activations),
                over_bound=timeline.makespan / bound,
                searched_over_bound=best.makespan / bound,
                gain=1 - best.makespan / timeline.makespan,
                origin=best.origin,
            )
        )
    return result


def main(
    effort: Annotated[float, typer.Option(help="Scales the time that each search takes; 1 is some ten seconds.")] = 0.2,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compare every named schedule with its lower bound, and with a search within its memory."""
    measured = [row for setting in (*SETTINGS, UNEQUAL) for row in rows(setting, effort)]
    if as_json:
        print(json.dumps({"schema_version": 1, "ranks": RANKS, "rows": [asdict(row) for row in measured]}, indent=2))
        return
    console = Console(width=110)
    for setting in (*SETTINGS, UNEQUAL):
        table = Table("schedule", "stages", "peak", "÷ bound", "search ÷ bound", "gain", "made from", title=setting)
        for row in (row for row in measured if row.setting == setting):
            figures = f"{row.over_bound:.4f}", f"{row.searched_over_bound:.4f}", f"{row.gain:.2%}"
            table.add_row(row.schedule, str(row.stages), str(row.peak_activations), *figures, row.origin)
        console.print(table)
        console.print(f"median gain {median(row.gain for row in measured if row.setting == setting):.2%}\n")


if __name__ == "__main__":
    typer.run(main)
