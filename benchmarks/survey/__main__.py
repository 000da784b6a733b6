"""The command: `python -m benchmarks.survey [--only NAME] [--markdown] [--keep DIR]`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.survey.examination import examine
from benchmarks.survey.table import markdown_lines, report_lines, summary

app = typer.Typer(add_completion=False)


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Models whose name or origin contains this.")] = None,
    markdown: Annotated[bool, typer.Option(help="Print Markdown tables.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep the packages under this folder.")] = None,
) -> None:
    """Split every model in three, and compare its stages with it at other sizes, in other dtypes and in both modes.

    Ends with exit code 1 if a wrong number came without an error.
    """
    from benchmarks.survey.catalogue import cases

    reports = []
    with _quiet_and_repeatable(), tempfile.TemporaryDirectory() as temporary:
        for case in cases():
            if only and not any(part.lower() in f"{case.name} {case.origin}".lower() for part in only):
                continue
            folder = (keep or Path(temporary)) / "".join(letter if letter.isalnum() else "_" for letter in case.name)
            reports.append(examine(case, folder))
            for line in report_lines(reports[-1]):
                typer.echo(line, err=markdown)
    for line in markdown_lines(reports) if markdown else ():
        print(line)
    typer.echo(summary(reports), err=markdown)
    if any(report.has_silent_error for report in reports):
        raise typer.Exit(1)


@contextmanager
def _quiet_and_repeatable() -> Iterator[None]:
    """Keep torch.export's and transformers' messages away, and sums of torch the same on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)


if __name__ == "__main__":
    app()
