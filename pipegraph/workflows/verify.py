"""Compare a package with its model: its weights, one training step, and the outputs in evaluation mode after it.

The model is built anew and runs as a whole, and the package's stages run one after the other in this process, both on
the model's example inputs. The package's weights are never loaded into the model, so that other weights are found.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite, isnan
from os import PathLike
from typing import Any

from torch import Tensor

from pipegraph.cost.model_output import output_tensors
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Package
from pipegraph.report.text import clip, table
from pipegraph.runtime.loss_reduction import LossFunction
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.workflows.batch import at_asked_sizes, explain_model_mismatch, source_loss
from pipegraph.workflows.reference_step import (
    StepTensors,
    TensorComparison,
    compare,
    compare_named,
    run_model,
    within_rounding,
)

_KINDS = ("weight", "output", "loss", "gradient", "buffer", "evaluation")
_WORST = 8  # names listed per verification
_SMALL = 100  # times its tolerance: a difference up to there may come from another order of sums
_NUDGES = 3  # steps of the model with other last digits, where something differs


def verify(
    package: Package,
    source: ModelSource,
    weights: str | PathLike[str] | None = None,
    check_weights: bool = True,
) -> Verification:
    """Compare one step of a package with the same step of its model, and what both return in evaluation mode after it.

    If training is random, with dropout, the step runs in evaluation mode, too. What differs by more than the tolerance
    is compared with what the last digit of the weights and inputs changes in the model: rounding does as much.

    Args:
        package: as `pipegraph split` wrote it. One without weights gets the model's.
        source: the model, with real weights, its example inputs and loss. The step has as many rows and tokens as it
            asks for.
        weights: a Hugging Face checkpoint from which the package's weights are read instead.
        check_weights: as in `Pipeline`.

    Raises:
        SourceError: the model or its loss raises an error.
        BatchError: the package does not take the example inputs.
        PackageError: the package cannot be loaded.
    """
    source = at_asked_sizes(source)
    loss_fn = source_loss(source)
    reference = run_model(source, loss_fn)
    is_random = _is_random(source, loss_fn, reference)
    training = source.model.training and not is_random
    if source.model.training and not training:
        reference = run_model(source, loss_fn, evaluate=True)
        is_random = _is_random(source, loss_fn, reference, evaluate=True)
    found, same_weights = _run_package(package, source, loss_fn, not training, weights, check_weights)
    comparisons = list(_compare(reference, found))
    if not is_random and all(item.equal for item in same_weights) and not all(item.equal for item in comparisons):
        nudged = (run_model(source, loss_fn, not training, seed=seed, nudged=True) for seed in range(_NUDGES))
        comparisons = _within_rounding(comparisons, reference, nudged)
    return Verification(training, (*same_weights, *comparisons), package.edited(), weights, is_random)


def _is_random(source: ModelSource, loss_fn: LossFunction, first: StepTensors, evaluate: bool = False) -> bool:
    """Return whether another forward of the model gives other results."""
    again = run_model(source, loss_fn, evaluate, backward=False, seed=1)
    return not all(comparison.equal for comparison in compare_named("output", first.outputs, again.outputs))


def _run_package(
    package: Package,
    source: ModelSource,
    loss_fn: LossFunction,
    evaluate: bool,
    weights: str | PathLike[str] | None,
    check_weights: bool,
) -> tuple[StepTensors, list[TensorComparison]]:
    """Return what a step of the package makes, and its weights before that compared with the model's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing weights, which are loaded below
        pipeline = Pipeline(
            package,
            schedule="gpipe",
            microbatches=1,
            loss_fn=loss_fn,
            kernels="eager",
            weights=weights,
            check_weights=check_weights,
        )
    same_weights: list[TensorComparison] = []
    if weights is not None or package.has_weights:
        same_weights = _compare_weights(source.model.state_dict(), pipeline.state_dict())
    else:
        with explain_model_mismatch(package.manifest, source):
            pipeline.load_state_dict(source.model.state_dict())
    if evaluate:
        _set_evaluation_mode(pipeline)
    args, kwargs, target = copy.deepcopy((source.args, source.kwargs, source.example_target))
    with explain_model_mismatch(package.manifest, source):
        result = pipeline.step(*args, target=target, return_outputs=True, **kwargs)
    gradients: dict[str, Tensor | None] = {}
    buffers: dict[str, Tensor] = {}
    for stage in pipeline.stages.values():
        gradients |= {name: parameter.grad for name, parameter in stage.named_parameters(remove_duplicate=False)}
        buffers |= dict(stage.named_buffers(remove_duplicate=False))
    assert result.loss is not None, "every stage runs in this process, the last one too"
    outputs = output_tensors(result.outputs)
    _set_evaluation_mode(pipeline)
    args, kwargs = copy.deepcopy((source.args, source.kwargs))
    evaluated = output_tensors(pipeline.eval(*args, **kwargs))
    return StepTensors(outputs, result.loss.detach(), gradients, buffers, evaluated), same_weights


def _compare_weights(reference: dict[str, Tensor], found: dict[str, Tensor]) -> list[TensorComparison]:
    """Compare what the stages hold, in the order of the model. What it does not use no stage holds."""
    places = {name: place for place, name in enumerate(reference)}
    names = sorted(found, key=lambda name: places.get(name, len(places)))
    return [compare("weight", name, found[name], reference.get(name)) for name in names]


def _compare(reference: StepTensors, found: StepTensors) -> Iterator[TensorComparison]:
    others = found.by_kind()
    for kind, tensors in reference.by_kind().items():
        if kind == "buffer":  # a constant of the model's code is a buffer of a stage only
            tensors = {name: tensors[name] for name in sorted(tensors.keys() & others[kind].keys())}
            others[kind] = {name: others[kind][name] for name in tensors}
        yield from compare_named(kind, tensors, others[kind])


def _within_rounding(
    comparisons: Iterable[TensorComparison], reference: StepTensors, nudged: Iterable[StepTensors]
) -> list[TensorComparison]:
    """Give what differs the tolerance of what steps of the model with other last digits change in it.

    A tensor that only the stages have, as an output that the model returns in training mode alone, has none.
    """
    rounding: dict[tuple[str, str], float] = {}
    for step in nudged:
        for item in _compare(reference, step):
            key = item.kind, item.name
            rounding[key] = max(rounding.get(key, 0.0), item.difference)
    return [
        item if item.equal else within_rounding(item, rounding.get((item.kind, item.name), 0.0)) for item in comparisons
    ]


def _set_evaluation_mode(pipeline: Pipeline) -> None:
    for stage in pipeline.stages.values():
        stage.eval()


@dataclass(frozen=True)
class Verification:
    """Everything that was compared, in both modes or in evaluation mode alone.

    Attributes:
        training: whether the step ran in training mode.
        comparisons: of each kind in the order of the model.
        edited: generated files that are not as they were written.
        weights: the checkpoint that was read.
        is_random: whether the model itself returns something else each time, in evaluation mode too.
    """

    training: bool
    comparisons: tuple[TensorComparison, ...]
    edited: tuple[str, ...] = ()
    weights: str | PathLike[str] | None = None
    is_random: bool = False

    @property
    def equal(self) -> bool:
        return all(comparison.equal for comparison in self.comparisons)

    def of(self, kind: str) -> tuple[TensorComparison, ...]:
        """Return the comparisons of one kind, the worst first."""
        found = [comparison for comparison in self.comparisons if comparison.kind == kind]
        return tuple(sorted(found, key=lambda each: (each.equal, not isnan(each.difference), -each.difference)))

    @property
    def different(self) -> tuple[TensorComparison, ...]:
        return tuple(item for kind in _KINDS for item in self.of(kind) if not item.equal)

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
            found = self.of(kind)
            if found:
                worst = found[0]
                rows.append(
                    [kind, str(len(found)), f"{worst.difference:.1e}", clip(worst.name) if worst.difference else ""]
                )
        mode = "training and evaluation" if self.training else "evaluation"
        lines = [table(["what", "compared", "largest difference", "at"], rows), ""]
        if self.equal:
            within = f"{max(comparison.tolerance for comparison in self.comparisons):.0e}"
            return "\n".join([*lines, f"equal in {mode} mode, within {within} relative"])
        named = [f"  {item.kind} {clip(item.name)}: {item}" for item in self.different[:_WORST]]
        more = len(self.different) - len(named)
        rest = [f"  and {more} more"] if more > 0 else []
        return "\n".join([*lines, "DIFFERENT:", *named, *rest])

    def to_dict(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "mode": "training" if self.training else "evaluation",
            "compared": {kind: len(self.of(kind)) for kind in _KINDS if self.of(kind)},
            "largest_difference": {kind: _number(self.of(kind)[0].difference) for kind in _KINDS if self.of(kind)},
            "different": [
                {"kind": item.kind, "name": item.name, "difference": _number(item.difference)}
                for item in self.different
            ],
        }


def _number(value: float) -> float | str:
    """Return what JSON can hold: it has neither infinity nor nan."""
    return value if isfinite(value) else str(value)
