"""Predicted beside measured: stages, a step, and memory, at the end of ``pipegraph run``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipegraph.cost import SegmentCost
from pipegraph.cost.hardware import Hardware
from pipegraph.package import Manifest
from pipegraph.report.planned_step import difference
from pipegraph.report.predicted_step import predicted
from pipegraph.report.tables import table
from pipegraph.runtime.measurements import COMPUTING, MeasuredRun
from pipegraph.schedule import Kind, Schedule
from pipegraph.units import TimeFormat, format_bytes, format_factor, format_percent

_FAR = 0.3
"""Of what was predicted: by so much stages may take more or less before it is said what to do."""


@dataclass(frozen=True)
class Pair:
    """A figure as it was predicted and measured; None where it was not."""

    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Of the prediction, as a part of what was measured; None where there is nothing to compare."""
        if not self.predicted or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Beside:
    """What was predicted of a run, beside what it took.

    Attributes:
        stages: of each stage, seconds of each kind of action that the schedule has; B is compared with I + W.
        step: seconds; with all ranks in one process, which then take turns, what they take together.
        bubble: the part of a step in which even the busiest rank computes nothing, measured step by step; None where
            ranks take turns.
        state, saved: bytes of each rank.
        buffers: predicted bytes of each rank to receive into.
        measured: the run.
        basis: what priced it: ``time on h100``; empty where nothing did.
        hints: what to know, or do, where figures are missing or not to be compared.
    """

    schedule: Schedule
    stages: tuple[dict[Kind, Pair], ...]
    step: Pair
    bubble: Pair | None
    state: tuple[Pair, ...]
    saved: tuple[Pair, ...]
    buffers: tuple[int | None, ...]
    measured: MeasuredRun
    basis: str
    hints: tuple[str, ...]


def beside(manifest: Manifest, schedule: Schedule, measured: MeasuredRun, hardware: Hardware | None = None) -> Beside:
    """Compare a run with what its package's prices come to under the run's schedule.

    ``hardware`` has the links. By default a planned step is what the plan says; one of another schedule has the links
    of the profile that priced the package, where it is one that pipegraph has, or else crossing takes no time.
    """
    plan, in_turn = manifest.prediction, measured.processes < schedule.ranks
    found = predicted(manifest, schedule, hardware, in_turn)
    priced, memory = None if found.times is None else found.costs, found.memory
    kinds = [kind for kind in COMPUTING if any(action.kind is kind for row in schedule.actions for action in row)]
    stages = tuple(
        {
            kind: Pair(_predicted(priced[stage], kind) if priced else None, measured.times.get((stage, kind)))
            for kind in kinds
        }
        for stage in range(schedule.stages)
    )
    return Beside(
        schedule=schedule,
        stages=stages,
        step=Pair(found.step, measured.step),
        bubble=None if in_turn else Pair(found.bubble, measured.bubble),
        state=tuple(Pair(memory[n].state if memory else None, held) for n, held in enumerate(measured.state)),
        saved=tuple(Pair(memory[n].saved if memory else None, held) for n, held in enumerate(measured.saved)),
        buffers=tuple(memory[n].buffers if memory else None for n in range(schedule.ranks)),
        measured=measured,
        basis=f"{plan.balance} on {plan.hardware}" if priced and plan else "",
        hints=tuple(
            filter(None, [difference(manifest, schedule), *_hints(manifest, stages, measured, found.links_known)])
        ),
    )


def _predicted(cost: SegmentCost, kind: Kind) -> float:
    """Seconds of one action."""
    return {
        Kind.F: cost.forward,
        Kind.I: cost.input_grad,
        Kind.W: cost.weight_grad,
        Kind.B: cost.input_grad + cost.weight_grad,
    }[kind]


def _hints(
    manifest: Manifest, stages: Sequence[Mapping[Kind, Pair]], measured: MeasuredRun, known: bool
) -> Iterator[str]:
    """``known`` says whether the links are, of a package with predicted times."""
    plan = manifest.prediction
    timed = all(pair.predicted is not None for stage in stages for pair in stage.values())
    priced = timed or all(stage.cost.saved_bytes is not None for stage in manifest.stages)
    if not measured.steps:
        yield "Times are taken from the second step on, as the first one compiles. Try: --steps 5"
    if not timed:
        yield "The package has no predicted times. Try: pipegraph split … --balance time"
    if priced and measured.kernels != "inductor":
        what = "Times and bytes were predicted" if timed else "Bytes were predicted"
        yield f"{what} of compiled kernels, and those of {measured.kernels} ran."
    elif timed:
        yield _off(plan.balance if plan else "", stages)
    if timed and not known:
        name = plan.hardware if plan else "the hardware"
        yield f"The links of {name} are not known here and were left out. Try: --hardware with the profile's file"


def _off(balance: str, stages: Sequence[Mapping[Kind, Pair]]) -> str:
    """What to do where stages together took much more or less than predicted; empty where they did not."""
    known = [pair for stage in stages for pair in stage.values() if pair.predicted and pair.measured]
    factor = (
        sum(pair.measured or 0.0 for pair in known) / sum(pair.predicted or 0.0 for pair in known) if known else 1.0
    )
    if abs(factor - 1) <= _FAR:
        return ""
    said = f"Stages took {format_factor(factor)} times what was predicted."
    if balance != "time":
        return f"{said} They were priced by a measurement: was it of this device, and was that doing nothing else?"
    return (
        f"{said} Try, where nothing else runs: pipegraph calibrate -o hardware.json and pipegraph split … "
        "--hardware hardware.json, or pipegraph run … --recalibrate corrected.json"
    )


def told(compared: Beside) -> str:
    """Tables of stages, step and memory, and what to do where something is missing."""
    parts = [_heading(compared)]
    if compared.measured.step is not None:
        parts += [_stages(compared), _steps(compared)]
    parts += [_memory(compared), "\n".join(compared.hints)]
    return "\n\n".join(filter(None, parts))


def _heading(compared: Beside) -> str:
    priced = f"predicted ({compared.basis})" if compared.basis else "nothing was predicted"
    count = compared.measured.steps
    if not count:
        return f"{priced}; memory as measured"
    steps = f"{count} step{'s' if count > 1 else ''}"
    return f"{priced}; measured: medians of {steps}, without the first; times of stages in {_unit(compared).unit}"


def _stages(compared: Beside) -> str:
    unit, headers, rows = _unit(compared), ["stage", "rank"], []
    for kind in compared.stages[0]:
        headers += [f"{kind} predicted", "measured", "error"]
    for number, stage in enumerate(compared.stages):
        row = [str(number), str(compared.schedule.placement[number])]
        for pair in stage.values():
            row += [unit.number(pair.predicted), unit.number(pair.measured), _error(pair)]
        rows.append(row)
    return table(headers, rows)


def _unit(compared: Beside) -> TimeFormat:
    """Of the times of stages."""
    pairs = [pair for stage in compared.stages for pair in stage.values()]
    return TimeFormat.of_column(figure for pair in pairs for figure in (pair.predicted, pair.measured))


def _steps(compared: Beside) -> str:
    step, bubble = compared.step, compared.bubble
    unit = TimeFormat.of_column([step.predicted, step.measured])
    turns = f"step, {compared.schedule.ranks} ranks in turn"
    rows = [["step" if bubble else turns, unit.text(step.predicted), unit.text(step.measured), _error(step)]]
    if bubble is not None:
        parts = [format_percent(each) for each in (bubble.predicted, bubble.measured)]
        rows.append(["bubble", *parts, ""])
    return table(["", "predicted", "measured", "error"], rows)


def _memory(compared: Beside) -> str:
    headers = ["rank", "state predicted", "measured", "saved predicted", "measured", "buffers predicted"]
    rows = [
        [str(rank), *map(format_bytes, (state.predicted, state.measured, saved.predicted, saved.measured, buffers))]
        for rank, (state, saved, buffers) in enumerate(
            zip(compared.state, compared.saved, compared.buffers, strict=True)
        )
    ]
    allocated = compared.measured.allocated
    if len(allocated) == len(rows):
        headers.append("allocated")
        rows = [[*row, format_bytes(each)] for row, each in zip(rows, allocated, strict=True)]
    lines = [
        table(headers, rows),
        "state: parameters, buffers, gradients and AdamW's moments; saved: kept for backwards, at the most",
    ]
    if allocated and len(allocated) < len(rows):
        lines.append(f"allocated on the GPU by all ranks together, at the most: {format_bytes(sum(allocated))}")
    return "\n".join(lines)


def beside_dict(compared: Beside) -> dict[str, Any]:
    """The same as data, for ``--json``: seconds and bytes."""
    return {
        "priced_by": compared.basis or None,
        "measured_steps": compared.measured.steps,
        "processes": compared.measured.processes,
        "stages": [
            {
                "stage": number,
                "rank": compared.schedule.placement[number],
                **{str(kind): asdict(pair) for kind, pair in stage.items()},
            }
            for number, stage in enumerate(compared.stages)
        ],
        "step": asdict(compared.step),
        "bubble": None if compared.bubble is None else asdict(compared.bubble),
        "memory": [
            {"rank": rank, "state": asdict(state), "saved": asdict(saved), "buffers": {"predicted": buffers}}
            for rank, (state, saved, buffers) in enumerate(
                zip(compared.state, compared.saved, compared.buffers, strict=True)
            )
        ],
        "allocated": list(compared.measured.allocated) or None,
        "hints": list(compared.hints),
    }


def _error(pair: Pair) -> str:
    return "" if pair.error is None else format_percent(pair.error, signed=True)
