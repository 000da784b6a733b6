"""The result of `verify`: everything that was compared, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan
from os import PathLike
from typing import Any

from pipegraph.report.text import clip, table
from pipegraph.workflows.reference_step import TensorComparison
from pipegraph.workflows.verification_batch import VerificationBatch

_KINDS = ("weight", "output", "loss", "gradient", "buffer", "evaluation")
_WORST = 8  # names listed per verification
_SMALL = 100  # times its tolerance: a difference up to there may come from another order of sums


@dataclass(frozen=True)
class Verification:
    """Everything that was compared, in both modes or in evaluation mode alone.

    Attributes:
        training: whether the step ran in training mode.
        comparisons: of each kind in the order of the model.
        edited: generated files that are not as they were written.
        weights: the checkpoint that was read.
        is_random: whether the model itself returns something else each time, in evaluation mode too.
        batch: what the step ran on.
        notes: what was not compared with the model on the whole batch, and why.
        roles: of the inputs, if the package computes what the model computes for each microbatch alone; else "".
    """

    training: bool
    comparisons: tuple[TensorComparison, ...]
    edited: tuple[str, ...] = ()
    weights: str | PathLike[str] | None = None
    is_random: bool = False
    batch: VerificationBatch | None = None
    notes: tuple[str, ...] = ()
    roles: str = ""

    @property
    def equal(self) -> bool:
        return all(comparison.equal for comparison in self.comparisons)

    def of_kind(self, kind: str) -> tuple[TensorComparison, ...]:
        """Return the comparisons of one kind, the worst first."""
        matches = [comparison for comparison in self.comparisons if comparison.kind == kind]
        return tuple(sorted(matches, key=lambda match: (match.equal, not isnan(match.difference), -match.difference)))

    @property
    def different(self) -> tuple[TensorComparison, ...]:
        return tuple(item for kind in _KINDS for item in self.of_kind(kind) if not item.equal)

    def hint(self) -> str:
        """Return the likeliest reason for a difference, and one thing to try."""
        weights = [item for item in self.comparisons if item.kind == "weight"]
        changed = [item for item in weights if not item.equal]
        if changed and all(item.problem for item in changed):
            return (
                f"The package's weights are not of the model's types: {clip(changed[0].name)} is {changed[0]}.\n"
                "Try: build_model with the dtypes and sizes that were split, or split again."
            )
        if changed:
            holder = self.weights if self.weights is not None else "The package"
            first = f"{holder} holds other weights than the model: {clip(changed[0].name)} is the first that differs"
            advice = (
                "the checkpoint that MODEL is made from"
                if self.weights is not None
                else "seed build_model (torch.manual_seed) so that it builds the same model each time, and split again"
            )
            return f"{first}, of {len(changed)} that do and {len(weights)} in all.\nTry: {advice}."
        if self.edited:
            return f"Edited since they were written: {', '.join(self.edited)}.\nTry: undo the edits, or split again."
        if self.is_random:
            return (
                "The model itself returns something else each time, in evaluation mode too: it draws random numbers.\n"
                "Try: draw them `if self.training:` alone, or make them once in __init__."
            )
        if self.roles:
            return (
                "The package returns what the model returns for each microbatch, and not for the whole batch: an input "
                f"has a wrong role, or the model mixes rows. Its inputs: {self.roles}.\n"
                "Try: split again with --batch-dim NAME=DIM, NAME=whole or NAME=list for the input with a wrong role."
            )
        if all(item.tolerance < item.difference <= _SMALL * item.tolerance for item in self.different):
            return (
                "The differences are small, as from sums in another order: what crosses stages arrives contiguous, and "
                "in the model it may have another layout of memory.\n"
                "Try: model.double() in build_model, and split again: what is left in float64 is no rounding."
            )
        return "Try: split again, as the model's source may have changed since."

    def __str__(self) -> str:
        rows = []
        for kind in _KINDS:
            matches = self.of_kind(kind)
            if matches:
                worst = matches[0]
                rows.append(
                    [kind, str(len(matches)), f"{worst.difference:.1e}", clip(worst.name) if not worst.equal else ""]
                )
        mode = "training and evaluation" if self.training else "evaluation"
        lines = [table(["what", "compared", "largest difference", "at"], rows), ""]
        if self.batch is not None:
            lines += [f"batch: {self.batch}", *(f"note: {note}" for note in self.notes)]
        if self.equal:
            within = f"{max(comparison.tolerance for comparison in self.comparisons):.0e}"
            return "\n".join([*lines, f"equal in {mode} mode, within {within} relative"])
        named = [f"  {item.kind} {clip(item.name)}: {item}" for item in self.different[:_WORST]]
        unlisted = len(self.different) - len(named)
        remainder = [f"  and {unlisted} more"] if unlisted > 0 else []
        return "\n".join([*lines, "DIFFERENT:", *named, *remainder])

    def to_dict(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "mode": "training" if self.training else "evaluation",
            "microbatches": None if self.batch is None else list(self.batch.rows),
            "notes": list(self.notes),
            "compared": {kind: len(self.of_kind(kind)) for kind in _KINDS if self.of_kind(kind)},
            "largest_difference": {
                kind: _number(self.of_kind(kind)[0].difference) for kind in _KINDS if self.of_kind(kind)
            },
            "different": [
                {"kind": item.kind, "name": item.name, "difference": _number(item.difference)}
                for item in self.different
            ],
        }


def _number(value: float) -> float | str:
    """Return what JSON can hold: it has neither infinity nor nan."""
    return value if isfinite(value) else str(value)
