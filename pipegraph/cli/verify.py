"""``pipegraph verify OUT MODEL``: check that the package computes what the model computes."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from pipegraph.cli.options import (
    BatchOption,
    CheckpointOption,
    CheckWeightsOption,
    DebugOption,
    JsonOption,
    ModelArgument,
    PackageArgument,
    SequenceOption,
)
from pipegraph.cli.output import print_json, print_text, wrapped
from pipegraph.cli.progress_bar import progress


def verify(
    out: PackageArgument,
    model: ModelArgument,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    weights: CheckpointOption = None,
    check_weights: CheckWeightsOption = True,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare a package with the unsplit model.

    Its weights, outputs, loss and gradients, of two microbatches of rows that all differ, are compared with those of
    the model on the whole batch. Exit code 1: they differ.

    \b
    Example:
      pipegraph verify build/unet examples/unet.py
    """
    from pipegraph.package import Package, checkpoint_folder

    if out.is_file() and Path(model).is_dir():
        raise typer.BadParameter(
            f"{out} is a file, and {model} a folder: the package comes before the model.\n"
            f"Try: pipegraph verify {model} {out}",
            param_hint="OUT MODEL",
        )
    package = Package.open(out)
    if weights is not None:
        checkpoint_folder(weights)
    with progress(f"loading {model}"):
        from pipegraph.graph.sources import load
        from pipegraph.workflows.verify import verify as compare

        source = load(model, True, batch, seq, attention_mask="attention_mask" in package.manifest.kwargs)
    with progress("comparing"):
        verification = compare(package, source, weights, check_weights)
    if json:
        print_json(verification.to_dict())
    else:
        print_text(lambda width: str(verification))
    if not verification.equal:
        message = f"error: {out} does not compute what {model} computes.\n{verification.hint()}"
        print(wrapped(message, sys.stderr), file=sys.stderr)
        raise typer.Exit(1)
