"""The files of a package, built from a plan: source and manifest. Nothing is written to disk here."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from msgspec import structs

from pipegraph.arguments import for_asker
from pipegraph.codegen.draft import Draft, draft
from pipegraph.codegen.general_sizes import with_general_sizes
from pipegraph.codegen.initial_values import patterns_of
from pipegraph.codegen.names.model_names import prose
from pipegraph.errors import PlanError
from pipegraph.graph.captured import OtherSize
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import CONFIG, ListedFile, Manifest
from pipegraph.package.json_file import json_text
from pipegraph.planner.plan import Plan

_LISTED = 8  # parameters that a warning names


def generate(plan: Plan, weights: bool = True, source: ModelSource | None = None) -> tuple[dict[str, str], Manifest]:
    """Generate a package without writing it.

    Args:
        plan: the stages.
        weights: whether shards will hold parameters, or only buffers. Without them, parameters whose initialisation is
            not known are named in a warning.
        source: where the model came from.

    Returns:
        the text of each file by its name, and the manifest.

    Raises:
        CaptureError: an operation comes from a library that a package could not import.
    """
    others: list[tuple[OtherSize, Draft]] = []
    for size in plan.captured.other_sizes:
        try:
            others.append((size, draft(plan.of(size.captured), weights, source)))
        except PlanError:  # a cut inside the loop, after an iteration that the other one does not have
            continue
    package = with_general_sizes(draft(plan, weights, source), others)
    model, class_name = source.name if source is not None else plan.captured.model_name, plan.captured.model_name
    guessed = package.source.initial_values.guessed
    if guessed and not weights:
        _warn_of_guesses(class_name, list(guessed))
    files = package.source.files(f"{prose(class_name)} ({prose(model)})")
    if source is not None and source.config is not None:  # for `pipegraph export`
        files[CONFIG] = json_text(dict(source.config)) + "\n"
    listed = {name: ListedFile.of_text(text) for name, text in files.items()}
    return files, structs.replace(package.manifest, files=listed)


def _warn_of_guesses(model: str, names: Sequence[str]) -> None:
    """Warn of parameters that start from guesses, which only matters where there are no weights."""
    listed = patterns_of(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    asked = for_asker("`pipegraph split FILE`", "split")
    warnings.warn(
        f"How {model} initialises {', '.join(listed[:_LISTED])}{more} is not known. Without weights they start from a "
        "guess: normal random numbers with the mean and standard deviation that their values have now, or with 0.02 "
        "where they have none. Try: correct GUESSES in weights.py of the package, or start from weights; "
        f"{asked} sees how build_model() of a file makes parameters with torch.randn, torch.nn.init and the like.",
        stacklevel=4,
    )
