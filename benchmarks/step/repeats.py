"""Runs of the same case put together: `python -m benchmarks.step.repeats RUN.json …` prints Markdown.

A run is what `python -m benchmarks.step --json` wrote. Each figure is a run's median; the table has the median of these
over the runs, with the least and the largest.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import typer

Run = dict[str, Any]


def main(files: list[Path]) -> None:
    """Print a row for each case and version of torch."""
    print(markdown([json.loads(file.read_text()) for file in files]), end="")


def markdown(runs: Iterable[Run]) -> str:
    """Return the table."""

    def key(run: Run) -> tuple[str, str, str]:
        return run["case"], run["torch"], run["machine"]

    rows = [["case", "torch", "runs", *figures({"best": "", "contenders": {}})]]  # no run: the columns alone
    for (case, torch, _), group in itertools.groupby(sorted(runs, key=key), key):
        summaries = [figures(run) for run in group]
        columns = zip(*(summary.values() for summary in summaries), strict=True)
        rows.append([case, torch, str(len(summaries)), *map(_cell, columns)])
    rows.insert(1, ["---", "---", "---:", *["---:"] * (len(rows[0]) - 3)])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def figures(run: Run) -> dict[str, float | None]:
    """Return a run's ratios of the fastest, by what a column is called; None if there is no such contender."""
    contenders, best = run["contenders"], run["best"]

    def fastest(start: str, is_even: bool) -> float | None:
        names = [name for name in contenders if name.startswith(start) and name.endswith(", even") == is_even]
        return min((contenders[name]["over_best"][1] for name in names), default=None)

    return {
        "pipegraph ÷ limit": contenders[best]["over_limit"][1] if best in contenders else None,
        "torch ÷ pipegraph": fastest("torch", False),
        "DeepSpeed ÷ pipegraph": fastest("DeepSpeed", False),
        "even split ÷ pipegraph": fastest("", True),
    }


def _cell(values: Sequence[float | None]) -> str:
    measured = [value for value in values if value is not None]
    return f"{median(measured):.3f} ({min(measured):.3f} – {max(measured):.3f})" if measured else "–"


if __name__ == "__main__":
    typer.run(main)
