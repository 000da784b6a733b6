"""``pipegraph verify OUT MODEL``: check that the package computes what the model computes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from pipegraph.cli.options import Command, opened_weights
from pipegraph.cli.output import print_json, print_text, wrapped
from pipegraph.cli.progress_bar import progress


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(Command):
    """Compare a package with the unsplit model.

    Its weights, outputs, loss and gradients, of two microbatches of rows that all differ, are compared with those of
    the model on the whole batch. Exit code 1: they differ.

    \b
    Example:
      pipegraph verify build/unet examples/unet.py
    """

    out: Path
    model: str
    batch: int | None = None
    seq: int | None = None
    weights: Path | None = None
    rename: list[str] | None = None
    rows: list[str] | None = None
    check_weights: bool = True

    def run(self) -> None:
        from pipegraph.package import Package

        if self.out.is_file() and Path(self.model).is_dir():
            raise typer.BadParameter(
                f"{self.out} is a file, and {self.model} a folder: the package comes before the model.\n"
                f"Try: pipegraph verify {self.model} {self.out}",
                param_hint="OUT MODEL",
            )
        package = Package.open(self.out)
        weights = opened_weights(self.weights, self.rename, self.rows)
        with progress(f"loading {self.model}"):
            from pipegraph.graph.sources import load
            from pipegraph.workflows.verify import verify

            has_mask = "attention_mask" in package.manifest.kwargs
            source = load(self.model, True, self.batch, self.seq, attention_mask=has_mask)
        with progress("comparing"):
            verification = verify(package, source, weights, self.check_weights)
        if self.json:
            print_json(verification.to_dict())
        else:
            print_text(lambda width: str(verification))
        if not verification.equal:
            message = f"error: {self.out} does not compute what {self.model} computes.\n{verification.hint()}"
            print(wrapped(message, sys.stderr), file=sys.stderr)
            raise typer.Exit(1)
