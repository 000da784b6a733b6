"""Compare a package with its model: one training step, and the outputs in evaluation mode after it.

A copy of the model runs as a whole, and the package's stages run one after the other in this process, both on the
model's example inputs. The package's weights are never loaded into the model, so that other weights are found.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, isinf, isnan
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from pipegraph.cost.model_output import output_tensors
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Package
from pipegraph.report.text import clip, table
from pipegraph.runtime.pipeline import LossFunction, Pipeline
from pipegraph.workflows.batch import explain_model_mismatch, source_loss

TOLERANCE = 1e-5
"""Relative, in float32; eight units in the last place for coarser formats, and none for integers."""

_KINDS = ("output", "loss", "gradient", "buffer", "parameter", "evaluation")
_WORST = 8  # names listed per verification


@dataclass(frozen=True)
class TensorComparison:
    """A tensor of the package compared with the model's. ``difference`` is relative; infinite if one lacks it.

    Its kind is that of a step's tensor, or ``evaluation`` for an output in evaluation mode after the step.
    """

    kind: str
    name: str
    difference: float
    tolerance: float

    @property
    def equal(self) -> bool:
        return self.difference <= self.tolerance  # false for nan


@dataclass(frozen=True)
class Verification:
    """Everything that was compared, in both modes or in evaluation mode alone. ``weights`` is the checkpoint that was
    read."""

    training: bool
    comparisons: tuple[TensorComparison, ...]
    same_weights: bool
    edited: tuple[str, ...]
    weights: str | PathLike[str] | None = None

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
        if not self.same_weights and self.weights is not None:
            return f"{self.weights} holds other weights than the model.\nTry: the checkpoint that MODEL is made from."
        if not self.same_weights:
            return (
                "The package holds other weights than the model has now.\n"
                "Try: seed build_model (torch.manual_seed) so that it builds the same model each time, and split again."
            )
        if self.edited:
            return f"Edited since they were written: {', '.join(self.edited)}.\nTry: undo the edits, or split again."
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
            return "\n".join([*lines, f"equal in {mode} mode, within {_tolerances(self.comparisons)} relative"])
        named = [f"  {item.kind} {clip(item.name)}: {item.difference:.1e}" for item in self.different[:_WORST]]
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


def verify(package: Package, source: ModelSource, weights: str | PathLike[str] | None = None) -> Verification:
    """Compare one step of a package with the same step of its model, and what both return in evaluation mode after it.

    If training is random, with dropout, the step runs in evaluation mode, too.

    Args:
        package: as `pipegraph split` wrote it. One without weights gets the model's.
        source: the model, with real weights, its example inputs and loss.
        weights: a Hugging Face checkpoint from which the package's weights are read instead.
    """
    loss_fn = source_loss(source)
    reference = _run_model(source, loss_fn)
    again = _run_model(source, loss_fn, backward=False)
    training = source.model.training and not _differ(reference, again)
    if source.model.training and not training:
        reference = _run_model(source, loss_fn, evaluate=True)
    found, same_weights = _run_package(package, source, loss_fn, not training, weights)
    return Verification(training, tuple(_compare(reference, found)), same_weights, package.edited(), weights)


@dataclass(frozen=True)
class _StepTensors:
    """Tensors of one step, by name. A parameter's gradient may be None."""

    outputs: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    evaluated: dict[str, Tensor]


def _run_model(
    source: ModelSource, loss_fn: LossFunction, evaluate: bool = False, backward: bool = True
) -> _StepTensors:
    model = copy.deepcopy(source.model)
    if evaluate:
        model.eval()
    args, kwargs, target = copy.deepcopy((source.args, source.kwargs, source.example_target))
    output = model(*args, **kwargs)
    loss = loss_fn(output, target)
    if backward and loss.requires_grad:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    evaluated: dict[str, Tensor] = {}
    if backward:
        args, kwargs = copy.deepcopy((source.args, source.kwargs))
        with torch.no_grad():
            evaluated = output_tensors(model.eval()(*args, **kwargs))
    return _StepTensors(output_tensors(output), loss.detach(), gradients, buffers, evaluated)


def _run_package(
    package: Package, source: ModelSource, loss_fn: LossFunction, evaluate: bool, weights: str | PathLike[str] | None
) -> tuple[_StepTensors, bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing weights, which are loaded below
        pipeline = Pipeline(
            package, schedule="gpipe", microbatches=1, loss_fn=loss_fn, kernels="eager", weights=weights
        )
    if weights is None and not package.has_weights:
        with explain_model_mismatch(package.manifest, source):
            pipeline.load_state_dict(source.model.state_dict())
    stages = list(pipeline.stages.values())
    expected = dict(source.model.named_parameters(remove_duplicate=False))
    same_weights = all(
        name in expected and torch.equal(parameter, expected[name])
        for stage in stages
        for name, parameter in stage.named_parameters(remove_duplicate=False)
    )
    if evaluate:
        for stage in stages:
            stage.eval()
    args, kwargs, target = copy.deepcopy((source.args, source.kwargs, source.example_target))
    with explain_model_mismatch(package.manifest, source):
        result = pipeline.step(*args, target=target, return_outputs=True, **kwargs)
    gradients: dict[str, Tensor | None] = {}
    buffers: dict[str, Tensor] = {}
    for stage in stages:
        gradients |= {name: parameter.grad for name, parameter in stage.named_parameters(remove_duplicate=False)}
        buffers |= dict(stage.named_buffers(remove_duplicate=False))
    assert result.loss is not None, "every stage runs in this process, the last one too"
    outputs = output_tensors(result.outputs)
    for stage in stages:
        stage.eval()
    args, kwargs = copy.deepcopy((source.args, source.kwargs))
    evaluated = output_tensors(pipeline.eval(*args, **kwargs))
    return _StepTensors(outputs, result.loss.detach(), gradients, buffers, evaluated), same_weights


def _compare(reference: _StepTensors, found: _StepTensors) -> Iterator[TensorComparison]:
    yield from _compare_named("output", reference.outputs, found.outputs)
    yield _comparison("loss", "loss", found.loss, reference.loss, 0.0)
    yield from _compare_named("gradient", reference.gradients, found.gradients)
    # A constant of the model's code is a buffer of a stage only.
    shared = sorted(reference.buffers.keys() & found.buffers.keys())
    buffers, others = ({name: run.buffers[name] for name in shared} for run in (reference, found))
    yield from _compare_named("buffer", buffers, others)
    yield from _compare_named("evaluation", reference.evaluated, found.evaluated)


def _compare_named(kind: str, reference: dict[str, Any], found: dict[str, Any]) -> Iterator[TensorComparison]:
    # Relative to a thousandth of the largest value at least: a tensor that is zero but for rounding, such as the
    # gradient of an attention's key bias, is then not reported.
    floor = max((_largest(tensor) for tensor in reference.values() if tensor is not None), default=0.0) / 1000
    for name in dict.fromkeys([*reference, *found]):
        yield _comparison(kind, name or kind, found.get(name), reference.get(name), floor)


def _comparison(kind: str, name: str, found: Tensor | None, reference: Tensor | None, floor: float) -> TensorComparison:
    """Return the largest difference of two tensors over the reference's largest value. A missing gradient is zero."""
    if found is None and reference is None:
        return TensorComparison(kind, name, 0.0, TOLERANCE)
    if found is None or reference is None:
        present = reference if found is None else found
        assert present is not None
        nothing = kind == "gradient" and _largest(present) == 0
        return TensorComparison(kind, name, 0.0 if nothing else float("inf"), TOLERANCE)
    if found.shape != reference.shape or found.dtype != reference.dtype:
        return TensorComparison(kind, name, float("inf"), TOLERANCE)
    exact = not (found.is_floating_point() or found.is_complex())
    tolerance = 0.0 if exact else max(TOLERANCE, 8 * torch.finfo(found.dtype).eps)
    if torch.equal(found, reference):  # the usual case; the rest makes copies
        return TensorComparison(kind, name, 0.0, tolerance)
    first, second = _double(found), _double(reference)
    # The difference of equal infinities, as in a mask, is 0.
    difference = torch.where(first == second, 0.0, first - second).abs()
    largest = float(difference.max()) if difference.numel() else 0.0
    relative = largest / max(_largest(reference), floor, 1e-30)
    return TensorComparison(kind, name, relative, tolerance)


def _double(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude of the finite values; nan if there is a nan, 0 if there are none."""
    if tensor.is_floating_point() and tensor.numel():
        largest = float(tensor.detach().abs().max())
        if not isinf(largest):
            return largest
    values = _double(tensor).abs()
    values = values[~values.isinf()]
    return float(values.max()) if values.numel() else 0.0


def _differ(first: _StepTensors, second: _StepTensors) -> bool:
    """Return whether two forwards of one model gave different results."""
    return not all(comparison.equal for comparison in _compare_named("output", first.outputs, second.outputs))


def _tolerances(comparisons: tuple[TensorComparison, ...]) -> str:
    return f"{max(comparison.tolerance for comparison in comparisons):.0e}"


def _number(value: float) -> float | str:
    """Return what JSON can hold: it has neither infinity nor nan."""
    return value if isfinite(value) else str(value)
