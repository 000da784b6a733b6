"""How often a rank gathers the parameters of its sharded stages in a step: torch, and pipegraph.

python benchmarks/gathers.py [--ranks 4] [--chunks 8] [--microbatches 16] [--resident 3] [--json]

F, I and W of a stage take 1 each, a gather and a reduction as long as --unshard. Rows: the order of interleaved-1f1b as
torch lowers it; the fewest gathers that this order allows, as `lower` places them; and the orders that `search` finds,
within the memory of that order, within twice that memory, and without a limit. Waiting is for gathers alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.pipelining.schedules import _Action, _add_unshard_reshard

from pipegraph.schedule import Schedule, Times, build, from_csv, lower, peak_activations, search, simulate


@dataclass(frozen=True)
class GatherRow:
    order: str
    gathers: tuple[int, ...]
    """by rank"""
    makespan: float
    waited: float
    """the most that a rank waits for gathers"""
    peak_activations: int


def torch_lowered(schedule: Schedule, resident: int) -> Schedule:
    """The schedule with the gathers that torch places: the next ``resident`` stages are whole, and no others."""
    lines = []
    for row in schedule.actions:
        last = {str(action): action.stage for action in {action.stage: action for action in row}.values()}
        line = []
        for torch_action in _add_unshard_reshard([_Action.from_str(str(action)) for action in row], resident):
            line += [cell := str(torch_action), *([f"{last[cell]}REDUCE_GRAD"] if cell in last else ())]
        lines.append(",".join(line))
    return from_csv("\n".join(lines))


def rows(ranks: int, chunks: int, microbatches: int, resident: int, unshard: float) -> Iterator[GatherRow]:
    stages = ranks * chunks
    times = Times.equal(stages, unshard=unshard, reduce_grad=unshard)
    order = build("interleaved-1f1b", ranks, microbatches, chunks)
    yield _row("interleaved-1f1b, torch", torch_lowered(order, resident), times)
    yield _row("interleaved-1f1b, fewest", lower(order, sharded=range(stages), resident=resident), times)
    peak = max(peak_activations(order))
    for label, limit in (("its memory", peak), ("twice its memory", 2 * peak), ("no limit", None)):
        schedule = search(times, ranks, microbatches, memory_limit=limit, resident=resident)
        yield _row(f"search, {label}: {schedule.origin}", schedule, times)


def _row(order: str, schedule: Schedule, times: Times) -> GatherRow:
    timeline = simulate(schedule, times)
    return GatherRow(
        order, schedule.gathers, timeline.makespan, max(timeline.gather_waits), max(timeline.peak_activations)
    )


def main(
    ranks: int = 4,
    chunks: int = 8,
    microbatches: int = 16,
    resident: int = 3,
    unshard: float = 1.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Count gathers per rank and step."""
    counted = list(rows(ranks, chunks, microbatches, resident, unshard))
    if as_json:
        print(json.dumps({"schema_version": 1, "rows": [asdict(row) for row in counted]}, indent=2))
        return
    table = Table("order", "gathers", "makespan", "waited", "peak activations")
    for row in counted:
        few = sorted({min(row.gathers), max(row.gathers)})
        figures = "–".join(map(str, few)), f"{row.makespan:g}", f"{row.waited:g}", str(row.peak_activations)
        table.add_row(row.order, *figures)
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
