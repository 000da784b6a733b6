"""The files of a package, built from a plan and compared with it: source and manifest. No package is written here."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from msgspec import structs

from pipegraph.arguments import for_asker
from pipegraph.codegen.draft import Draft, draft
from pipegraph.codegen.forms import USUAL, Forms
from pipegraph.codegen.general_sizes import with_general_sizes
from pipegraph.codegen.initial_values import patterns_of
from pipegraph.codegen.names.model_names import prose
from pipegraph.codegen.proof import Proof, differences_of_text, written_names
from pipegraph.codegen.validation.validate import GraphDifference
from pipegraph.errors import CaptureError, PlanError
from pipegraph.graph.captured import OtherSize
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import CONFIG, ListedFile, Manifest
from pipegraph.package.json_file import json_text
from pipegraph.planner.plan import Plan

_LISTED = 8  # parameters that a warning names


@dataclass(frozen=True)
class Generated:
    """A package that is not written yet.

    Attributes:
        files: name → text.
        manifest: with the digests of these files.
        proof: that they equal the captured graph.
    """

    files: dict[str, str]
    manifest: Manifest
    proof: Proof


def generate(plan: Plan, weights: bool = True, source: ModelSource | None = None) -> Generated:
    """Generate a package without writing it, and compare it with the captured graph.

    Args:
        plan: the stages.
        weights: whether shards will hold parameters, or only buffers. Without them, parameters whose initialisation is
            not known are named in a warning.
        source: where the model came from.

    Raises:
        CaptureError: an operation comes from a library that a package could not import; or the source of a class is not
            the captured graph in any form.
    """
    begin = perf_counter()
    attempt = _attempt(plan, weights, source, USUAL)
    compared = attempt.seconds
    reasons: list[str] = []
    while attempt.differences:
        difference = attempt.differences[0]
        reasons.append(str(difference))
        forms = attempt.forms.plainer(written_names(attempt.package.source, difference))
        for plainer in forms:
            attempt = _attempt(plan, weights, source, plainer)
            compared += attempt.seconds
            if not attempt.lacks_operation_of(difference):
                break
        else:
            raise CaptureError(
                f"The written source is not the model: {difference}. Nothing was written.\n"
                "Try: a split point outside of that class; and please report it, with the class."
            )
    package, files = attempt.package, attempt.files
    guessed = package.source.initial_values.guessed
    if guessed and not weights:
        _warn_of_guesses(plan.captured.model_name, list(guessed))
    listed = {name: ListedFile.of_text(text) for name, text in files.items()}
    proof = Proof(compared, perf_counter() - begin - compared, attempt.forms.described(), tuple(reasons))
    return Generated(files, structs.replace(package.manifest, files=listed), proof)


@dataclass(frozen=True)
class _Attempt:
    """A package in one form of its classes, and where it differs from the captured graph."""

    forms: Forms
    package: Draft
    files: dict[str, str]
    differences: list[GraphDifference]
    seconds: float  # of the comparison

    def lacks_operation_of(self, difference: GraphDifference) -> bool:
        """Return whether the captured graph still has an operation that its stage lacks."""
        places = {(graph_difference.stage, graph_difference.captured) for graph_difference in self.differences}
        return (difference.stage, difference.captured) in places


def _attempt(plan: Plan, weights: bool, source: ModelSource | None, forms: Forms) -> _Attempt:
    package, plans = _draft(plan, weights, source, forms)
    files = _files(plan, package, source)
    begin = perf_counter()
    differences = differences_of_text(files, plans)
    return _Attempt(forms, package, files, differences, perf_counter() - begin)


def _draft(plan: Plan, weights: bool, source: ModelSource | None, forms: Forms) -> tuple[Draft, list[Plan]]:
    """A package, and the captured graphs that it must equal: the plan's, and those of other sizes that it takes."""
    drafts: list[tuple[OtherSize, Draft]] = []
    plans = {}
    for size in plan.captured.other_sizes:
        try:
            plans[size.name] = plan.for_capture(size.captured)
            drafts.append((size, draft(plans[size.name], weights, source, forms)))
        except PlanError:  # a cut inside the loop, after an iteration that the other one does not have
            continue
    package = with_general_sizes(draft(plan, weights, source, forms), drafts)
    return package, [plan, *(plans[name] for name in plans if name in package.manifest.sizes)]


def _files(plan: Plan, package: Draft, source: ModelSource | None) -> dict[str, str]:
    model, class_name = source.name if source is not None else plan.captured.model_name, plan.captured.model_name
    files = package.source.files(f"{prose(class_name)} ({prose(model)})")
    if source is not None and source.config is not None:  # for `pipegraph export`
        files[CONFIG] = json_text(dict(source.config)) + "\n"
    return files


def _warn_of_guesses(model: str, names: Sequence[str]) -> None:
    """Warn of parameters that start from guesses, which only matters where there are no weights."""
    listed = patterns_of(names)
    suffix = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    command = for_asker("`pipegraph split FILE`", "split")
    warnings.warn(
        f"How {model} initialises {', '.join(listed[:_LISTED])}{suffix} is not known. Without weights they start from "
        "a guess: normal random numbers with the mean and standard deviation that their values have now, or with 0.02 "
        "where they have none. Try: correct GUESSES in weights.py of the package, or start from weights; "
        f"{command} sees how build_model() of a file makes parameters with torch.randn, torch.nn.init and the like.",
        stacklevel=4,
    )
