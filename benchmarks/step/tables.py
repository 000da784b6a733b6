"""Runs as tables: in the terminal, and as the section of docs/benchmarks.md that shows what is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.step.account import CAUSES

PAGE = Path(__file__).parents[2] / "docs/benchmarks.md"
BEGIN, END = "<!-- what `python -m benchmarks.step --keep` keeps -->\n", "<!-- end of what is kept -->\n"
TITLES = {
    "peers": "Peers at their best, and the limit",
    "peers that keep memory": "Peers that keep freed memory, too, and the limit",
    "defaults": "What a default costs its user",
}

_SMALL = 0.002  # of the limit

Rows = list[list[str]]


def show(run: dict[str, Any]) -> None:
    """Print a run."""
    console = Console(width=140)
    for title, (columns, *rows) in tables(run):
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(conditions(run))
    for name, mistake in run["wrong"].items():
        console.print(f"[red]{name} is wrong and was not timed: {mistake}")


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Return runs as a section of a page."""
    if not runs:
        return "Nothing is kept: no run has been measured on a quiet machine since the contenders are at their best.\n"
    parts = []
    for run in runs:
        title, contenders = next(iter(tables(run)))
        columns, *rows = (row[:-1] for row in contenders)  # the last column follows from the one before
        ruler = ["---", *["---:"] * (len(columns) - 1)]
        lines = ("| " + " | ".join(row) + " |" for row in (columns, ruler, *rows))
        parts.append(f"### {title}\n\n" + "\n".join(lines) + "\n")
        parts += [_largest_causes(pipeline, account) + "\n" for pipeline, account in run["accounts"].items()]
        wrong = "".join(f"\n{name} was wrong and not timed: {mistake}.\n" for name, mistake in run["wrong"].items())
        parts.append(conditions(run) + "\n" + wrong)
    return "\n".join(parts)


def write_page(runs: Sequence[dict[str, Any]], page: Path = PAGE) -> None:
    """Put the runs into their section of the page."""
    head, tail = page.read_text().split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{markdown(runs)}\n{END}{tail.split(END)[1]}")


def tables(run: dict[str, Any]) -> Iterable[tuple[str, Rows]]:
    """Return title and rows, the columns' names first, of each table of a run."""
    name = f"{run['case']}, torch {run['torch']}, {run['machine'].partition(',')[0].removesuffix(' Processor')}"
    yield f"{TITLES[run['table']]}: {name}", _contenders(run)
    for pipeline, account in run["accounts"].items():
        yield f"Where {pipeline}'s time beyond the limit goes: {name}", _account(account)


def conditions(run: dict[str, Any]) -> str:
    """Return under what conditions a run was measured."""
    low, middle, high = (f"{part:.0%}" for part in run["others"])
    return (
        f"{run['date']}, {run['machine']}, {run['rounds']} rounds; medians with quartiles. Other programs had "
        f"{middle} of the cores ({low} – {high}); load average {run['load'][0]:.1f} before, {run['load'][1]:.1f} "
        "after."
    )


def _contenders(run: dict[str, Any]) -> Rows:
    rows = [["contender", "cut at", "seconds", "÷ limit", f"÷ {run['best']}"]]
    for name, contender in run["contenders"].items():
        ratios = (
            f"{middle:.3f} ({low:.3f} – {high:.3f})"
            for low, middle, high in (contender["over_limit"], contender["over_best"])
        )
        rows.append([name, ", ".join(contender["at"]), f"{contender['seconds']:.3f}", *ratios])
    return rows


def _largest_causes(pipeline: str, account: dict[str, Any]) -> str:
    """Return the causes of an account that take a part of the limit that is worth a word, the largest first."""
    parts = {
        cause: sum(rank[cause] for rank in account["ranks"]) / len(account["ranks"]) / account["limit"]
        for cause in CAUSES
    }
    largest = sorted((cause for cause in parts if abs(parts[cause]) >= _SMALL), key=lambda cause: -abs(parts[cause]))
    listed = ", ".join(f"{cause.replace('_', ' ')} {parts[cause]:+.3f}" for cause in largest)
    return f"The time of {pipeline} beyond the limit, as parts of the limit: {listed}."


def _account(account: dict[str, Any]) -> Rows:
    ranks = account["ranks"]
    rows = [["cause", *(f"rank {rank}, ms" for rank in range(len(ranks))), "mean, ms", "÷ limit"]]
    for cause in (*CAUSES, "all of them"):
        figures = [rank.get(cause, sum(rank.values())) for rank in ranks]
        mean = sum(figures) / len(ranks)
        cells = (f"{figure * 1000:+.1f}" for figure in (*figures, mean))
        rows.append([cause.replace("_", " "), *cells, f"{mean / account['limit']:+.4f}"])
    return rows
