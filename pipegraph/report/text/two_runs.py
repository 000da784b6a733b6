"""Two recorded runs side by side: their steps, where the time of a step goes, and their stages; as text and data."""

from __future__ import annotations

from dataclasses import astuple
from statistics import fmean
from typing import Any

from pipegraph.report.text import Table, table
from pipegraph.report.text.run_report import CAUSES, heading, trace_report_dict
from pipegraph.schedule import Kind
from pipegraph.tracing.analysis.run_analysis import RunAnalysis
from pipegraph.units import UNKNOWN, TimeFormat, format_percent

_Figures = tuple[float | None, float | None]
"""Seconds of the first run and of the second one."""


_COMPUTING = "computing"


def render_two_runs(first: RunAnalysis, second: RunAnalysis, width: int | None = None) -> str:
    """Return the text of ``pipegraph trace compare``."""
    runs = first, second
    parts = ["\n".join(f"{letter}  {heading(run)}" for letter, run in zip("AB", runs, strict=True))]
    parts += [table(*_times_table({"step": _steps(*runs), **_iterations(*runs)}), width)]
    bubbles = [format_percent(run.bubble) for run in runs]
    parts[-1] += f"\nbubble: {bubbles[0]} in A, {bubbles[1]} in B"
    shares = _shares(*runs)
    if shares:
        parts.append(
            f"where the time of the median step goes, the mean of its ranks\n{table(*_times_table(shares), width)}"
        )
        if (cause := _main_cause(shares)) is not None:
            parts[-1] += f"\n{cause}"
    stages = _stages(*runs)
    if stages:
        parts.append(f"a microbatch of each stage (medians)\n{table(*_times_table(stages), width)}")
    else:
        counts = [run.run.schedule.stages for run in runs]
        parts.append(f"A has {counts[0]} stages and B has {counts[1]}, so that they are not compared")
    return "\n\n".join(parts)


def two_runs_dict(first: RunAnalysis, second: RunAnalysis) -> dict[str, Any]:
    """Return the same as data, for ``--json``: seconds, and the report of each run."""

    def pairs(figures: dict[str, _Figures]) -> dict[str, dict[str, float | None]]:
        return {name: {"a": a, "b": b, "ratio": _ratio(a, b)} for name, (a, b) in figures.items()}

    return {
        "step": pairs({"step": _steps(first, second), **_iterations(first, second)}),
        "shares": pairs(_shares(first, second)),
        "stages": pairs(_stages(first, second)),
        "a": trace_report_dict(first),
        "b": trace_report_dict(second),
    }


def _steps(first: RunAnalysis, second: RunAnalysis) -> _Figures:
    """The seconds of the median step of each run; those of a simulated one where ranks shared a process."""
    a, b = (run.simulated.makespan if run.run.shares_process else run.step.makespan for run in (first, second))
    return a, b


def _iterations(first: RunAnalysis, second: RunAnalysis) -> dict[str, _Figures]:
    figures = first.iteration, second.iteration
    return {"with data and optimizer": figures} if any(figure is not None for figure in figures) else {}


def _shares(first: RunAnalysis, second: RunAnalysis) -> dict[str, _Figures]:
    """What ranks do in the median step: it adds up to the step. Empty if no rank of a run was recorded whole."""
    columns = []
    for run in (first, second):
        ranks = run.idle if run.run.shares_process else run.idle_by_step[run.step_index]
        if not ranks:
            return {}
        causes = [fmean(seconds) for seconds in zip(*(astuple(rank.causes) for rank in ranks), strict=True)]
        columns.append([fmean(rank.busy for rank in ranks), *causes])
    names = [_COMPUTING, *CAUSES]
    return dict(zip(names, zip(*columns, strict=True), strict=True))


def _main_cause(shares: dict[str, _Figures]) -> str | None:
    """Return a line on what differs the most; None if nothing does."""
    differences = {name: (b or 0.0) - (a or 0.0) for name, (a, b) in shares.items()}
    together = sum(differences.values())
    name = max(differences, key=lambda name: differences[name] if together > 0 else -differences[name])
    if not together:
        return None
    unit = TimeFormat.of_column([abs(together), abs(differences[name])])
    part = f"{name}, {'+' if differences[name] > 0 else '−'}{unit.text(abs(differences[name]))}"
    meaning = f" ({CAUSES[name]})" if name in CAUSES else ""
    comparison = "more" if together > 0 else "less"
    return f"B takes {unit.text(abs(together))} {comparison}; the largest difference is {part}{meaning}"


def _stages(first: RunAnalysis, second: RunAnalysis) -> dict[str, _Figures]:
    """The measured seconds of each kind of action of each stage; empty if the runs have other numbers of stages."""
    if len(first.stages) != len(second.stages):
        return {}
    figures: dict[str, _Figures] = {}
    for number, (of_first, of_second) in enumerate(zip(first.stages, second.stages, strict=True)):
        for kind in (kind for kind in Kind if kind in of_first or kind in of_second):
            a, b = (stage[kind].measured if kind in stage else None for stage in (of_first, of_second))
            figures[f"stage {number} {kind}"] = a, b
    return figures


def _times_table(figures: dict[str, _Figures]) -> Table:
    unit = TimeFormat.of_column(figure for pair in figures.values() for figure in pair)
    rows = [[name, unit.number(a), unit.number(b), _ratio_text(a, b)] for name, (a, b) in figures.items()]
    return [unit.unit, "A", "B", "B ÷ A"], rows


def _ratio(a: float | None, b: float | None) -> float | None:
    return b / a if a and b is not None else None


def _ratio_text(a: float | None, b: float | None) -> str:
    ratio = _ratio(a, b)
    return UNKNOWN if ratio is None else f"{ratio:.3f}"
