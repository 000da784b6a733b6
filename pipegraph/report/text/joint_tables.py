"""The joint plans worth a choice, and what the neighbours of the best one cost."""

from __future__ import annotations

from typing import Any

from pipegraph.planner.joint_plan.choices import JointChoice, JointComparison
from pipegraph.report.text import table
from pipegraph.units import TimeFormat, format_bytes, format_percent, format_seconds

_MESH = ("pp", "dp_replicate", "dp_shard", "tp")


def render_joint_comparison(
    comparison: JointComparison, global_batch: int, devices: int, tokens: int | None, width: int | None = None
) -> str:
    """Return the plans worth choosing from, and what each axis of the best would cost otherwise.

    ``tokens`` are those of a row; None if the model takes none. ``width`` is that of the terminal, in columns.
    """
    best = comparison.best
    unit = TimeFormat.of_column(choice.step for choice in comparison.choices)
    rate = "rows/s a device" if tokens is None else "tokens/s a device"
    has_resident = any(choice.candidate.resident for choice in comparison.choices)
    headers = ["", *_MESH, "schedule", "stages", *["resident"] * has_resident, "rows"]
    headers += ["microbatches", "step", rate, "slower", "memory"]
    rows = [
        [
            "*" if choice is best else "",
            *(str(getattr(choice.candidate.layout, name)) for name in _MESH),
            choice.candidate.schedule if choice.candidate.layout.pp > 1 else "no pipeline",
            str(choice.solution.schedule.stages),
            *[str(choice.candidate.resident or "all")] * has_resident,
            str(choice.candidate.rows),
            str(choice.candidate.microbatches),
            unit.text(choice.step),
            f"{(tokens or 1) * global_batch / choice.step / devices:,.0f}",
            "" if choice is best else format_percent(choice.step / best.step - 1),
            format_bytes(choice.peak),
        ]
        for choice in comparison.choices
    ]
    optional_columns = ["slower", "resident", "stages", "microbatches", "rows", rate, "memory"]
    return (
        f"{table(headers, rows, width, optional_columns)}\n\n"
        f"* the best of {comparison.considered:,} plans. Bounds rule out all but {comparison.searched}, whose cuts "
        f"were searched for.\nNo plan of all is better by more than {format_percent(comparison.gap)}.\n\n"
        f"{_neighbours(comparison, width)}"
    )


def _neighbours(comparison: JointComparison, width: int | None) -> str:
    best = comparison.best
    rows = [[neighbour.axis, neighbour.value, _change(neighbour.choice, best)] for neighbour in comparison.neighbours]
    return table(["of the best one", "with", "the step is"], rows, width)


def _change(choice: JointChoice | None, best: JointChoice) -> str:
    if choice is None:
        return "impossible, or does not fit"
    return f"{format_seconds(choice.step)}  {format_percent(choice.step / best.step - 1, signed=True)}"


def joint_comparison_dict(comparison: JointComparison) -> dict[str, Any]:
    """Return the same as data for ``--json``."""
    return {
        "considered": comparison.considered,
        "searched": comparison.searched,
        "lower_bound": comparison.lower_bound,
        "gap": comparison.gap,
        "alternatives": [_dict(choice) for choice in comparison.choices],
        "neighbours": [
            {"axis": change.axis, "value": change.value, "step": None if change.choice is None else change.choice.step}
            for change in comparison.neighbours
        ],
    }


def _dict(choice: JointChoice) -> dict[str, Any]:
    candidate = choice.candidate
    return {
        "mesh": {name: getattr(candidate.layout, name) for name in _MESH},
        "schedule": candidate.schedule,
        "stages": choice.solution.schedule.stages,
        "rows": candidate.rows,
        "microbatches": candidate.microbatches,
        "resident": candidate.resident,
        "recompute": [str(recompute) for recompute in choice.recompute],
        "step": choice.step,
        "lower_bound": choice.lower_bound,
        "memory": choice.peak,
    }
