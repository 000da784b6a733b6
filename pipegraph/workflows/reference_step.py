"""One step of a model without a pipeline, and how far the tensors of a package are from those of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite, isinf, nan
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.cost.model_output import output_tensors
from pipegraph.errors import PipegraphError, SourceError, user_line
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.kernels.loss import check_loss, divide_loss
from pipegraph.runtime.loss_reduction import LossFunction
from pipegraph.workflows.batch import Batch

TOLERANCE = 1e-5
"""Relative, in float32; eight units in the last place for coarser formats, and none for integers."""

_SAFETY = 16
"""How many times the effect of one unit in the last place of weights and inputs counts as rounding."""
_MOST = 0.1
"""A larger difference is not rounding, except in a loss, which may be a sum of much larger values."""


@dataclass(frozen=True)
class StepTensors:
    """Tensors of one step, by name. A parameter's gradient may be None."""

    outputs: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    evaluated: dict[str, Tensor]

    def by_kind(self) -> dict[str, Mapping[str, Tensor | None]]:
        """The tensors by the kinds of `TensorComparison`."""
        return {
            "output": self.outputs,
            "loss": {"loss": self.loss},
            "gradient": self.gradients,
            "buffer": self.buffers,
            "evaluation": self.evaluated,
        }


@dataclass(frozen=True)
class ModelStep:
    """A step of a model, as a whole or microbatch after microbatch.

    Attributes:
        source: the model.
        loss_fn: the loss of a microbatch.
        microbatches: what the model takes, one after the other; the whole batch is a single one.
        weights: the factor of the loss of each.
        evaluation: what the model takes after the step, in evaluation mode. If there is a whole batch, it comes first,
            and outputs without rows are those of the microbatches that follow.
        output_dims: the batch dimension of each output by its path, of the step and in evaluation mode.
        evaluate: whether the step runs in evaluation mode.
    """

    source: ModelSource
    loss_fn: LossFunction
    microbatches: Sequence[Batch]
    weights: Sequence[float]
    evaluation: Sequence[Sequence[Batch]]
    output_dims: tuple[Mapping[str, int | None], Mapping[str, int | None]]
    evaluate: bool

    def run(self, backward: bool = True, seed: int = 0, nudged: bool = False) -> StepTensors:
        """Run the step, and the model in evaluation mode after it, on a new copy of the model.

        Args:
            backward: without it, only the outputs and the loss are computed.
            seed: what random operations draw from.
            nudged: whether every parameter and input is first moved by one unit in its last place, up or down at
                random.

        Raises:
            SourceError: the model or the loss raises an error.
        """
        with own_model(self.source, seed) as model, _errors_named(self.source):
            if self.evaluate:
                model.eval()
            batches, evaluation = copy.deepcopy((list(self.microbatches), list(self.evaluation)))
            if nudged:
                inputs = output_tensors([(example.args, example.kwargs) for example in chain(batches, *evaluation)])
                _nudge([*model.parameters(), *inputs.values()])
            outputs, losses = [], []
            for batch, weight in zip(batches, self.weights, strict=True):
                output = model(*batch.args, **batch.kwargs)
                loss = _loss(self.source, self.loss_fn, output, batch.target)
                if backward and loss.requires_grad:
                    (loss * weight).backward()
                outputs.append(_detached(output))
                losses.append(loss.detach() * weight)
            gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
            buffers = dict(model.named_buffers(remove_duplicate=False))
            of_step, of_evaluation = self.output_dims
            evaluated: dict[str, Tensor] = {}
            model.eval()
            for group in evaluation if backward else ():
                with torch.no_grad():
                    parts = [_detached(model(*microbatch.args, **microbatch.kwargs)) for microbatch in group]
                outputs_of_group = joined_outputs(parts, of_evaluation)
                evaluated |= {
                    name: tensor
                    for name, tensor in outputs_of_group.items()
                    if name not in evaluated or of_evaluation.get(name) is None
                }
        return StepTensors(
            joined_outputs(outputs, of_step),
            torch.stack(losses).sum() if len(losses) > 1 else losses[0],
            gradients,
            buffers,
            evaluated,
        )


def joined_outputs(parts: Sequence[dict[str, Tensor]], dims: Mapping[str, int | None]) -> dict[str, Tensor]:
    """Join the outputs of microbatches along their batch. Those without rows are stacked.

    Outputs that other microbatches do not have are left out.
    """
    if len(parts) < 2:
        return dict(*parts)
    joined: dict[str, Tensor] = {}
    for name in parts[0]:
        tensors, dim = [part[name] for part in parts if name in part], dims.get(name)
        if len(tensors) == len(parts):
            joined[name] = torch.stack(tensors) if dim is None or tensors[0].dim() <= dim else torch.cat(tensors, dim)
    return joined


def _detached(output: Any) -> dict[str, Tensor]:
    # A later microbatch may write to what this one returned, such as a buffer.
    return {name: tensor.detach().clone() for name, tensor in output_tensors(output).items()}


def _loss(source: ModelSource, loss_fn: Callable[..., Any], output: Any, target: Any) -> Tensor:
    """The loss of an output. Raises PipegraphError if it is not a loss, or if `loss_fn` raises an error."""
    try:
        returned = loss_fn(output, target)
    except Exception as error:
        where = user_line(error)
        raise SourceError(
            f"loss_fn of {source.name} raised {type(error).__name__}: {error}{f' (at {where})' if where else ''}",
            "loss_fn(output, example_target) in Python, with what the model returns for its example_inputs.",
        ) from error
    loss, _ = divide_loss(returned)
    check_loss(loss)
    return loss


@contextmanager
def _errors_named(source: ModelSource) -> Iterator[None]:
    """Turn an error of the model into a SourceError that says where."""
    try:
        yield
    except PipegraphError:
        raise
    except Exception as error:
        where, name = user_line(error), type(source.model).__name__
        raise SourceError(
            f"{name} ({source.name}) raised {type(error).__name__}: {error}{f' (at {where})' if where else ''}",
            "the model itself on its example_inputs in Python; it should run without error.",
        ) from error


@contextmanager
def own_model(source: ModelSource, seed: int = 0) -> Iterator[nn.Module]:
    """The model of a source, built again with the same values, while random numbers are seeded.

    A deep copy would not do: what a lambda or a closure of the model holds is not copied.
    """
    with torch.random.fork_rng(devices=[]):
        model = source.rebuild() if source.rebuild is not None else source.model
        if model is source.model:
            model = copy.deepcopy(source.model)  # nothing builds another one
        else:
            _copy_values(source, model)
        torch.manual_seed(seed)
        yield model


def _copy_values(source: ModelSource, model: nn.Module) -> None:
    """Give a model that was built again the values of the first one: it need not be seeded."""
    state, values = dict(_tensors(model)), dict(_tensors(source.model))
    if {name: tensor.shape for name, tensor in state.items()} != {name: value.shape for name, value in values.items()}:
        differing = sorted(state.keys() ^ values.keys()) or sorted(
            name for name in state if state[name].shape != values[name].shape
        )
        raise SourceError(
            f"{source.name} builds another model each time: {differing[0]} differs.",
            "let it build the same modules with the same sizes whenever it runs.",
        )
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(values[name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


@torch.no_grad()
def _nudge(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            signs = torch.randint(2, tensor.shape, device=tensor.device) * 2 - 1
            moved = tensor + tensor * signs.to(tensor.dtype) * torch.finfo(tensor.dtype).eps
            tensor.copy_(torch.where(moved.isfinite(), moved, tensor))  # a mask may hold the least number that there is


@dataclass(frozen=True)
class TensorComparison:
    """A tensor of the package compared with the model's. ``difference`` is relative; infinite if one lacks it.

    Its kind is that of a step's tensor, ``weight`` for an entry of ``state_dict()`` before the step, or ``evaluation``
    for an output in evaluation mode after it. ``problem`` says what is not comparable: another dtype or shape.
    """

    kind: str
    name: str
    difference: float
    tolerance: float
    problem: str = ""

    @property
    def equal(self) -> bool:
        return self.difference <= self.tolerance  # false for nan

    def __str__(self) -> str:
        return self.problem or f"{self.difference:.1e}"


def compare_named(
    kind: str, reference: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None]
) -> Iterator[TensorComparison]:
    """Compare all tensors of a kind.

    A difference is relative to a thousandth of the largest value of them all at least: a tensor that is zero but for
    rounding, such as the gradient of an attention's key bias, is then not reported.
    """
    floor = max((largest(tensor) for tensor in reference.values() if tensor is not None), default=0.0) / 1000
    for name in dict.fromkeys([*reference, *actual]):
        yield compare(kind, name or kind, actual.get(name), reference.get(name), floor)


def compare(
    kind: str, name: str, actual: Tensor | None, reference: Tensor | None, floor: float = 0.0
) -> TensorComparison:
    """Compare the largest difference of two tensors with the reference's largest value. A missing gradient is zero."""
    if actual is None and reference is None:
        return TensorComparison(kind, name, 0.0, TOLERANCE)
    if actual is None or reference is None:
        present = reference if actual is None else actual
        assert present is not None
        if kind == "gradient" and largest(present) == 0:
            return TensorComparison(kind, name, 0.0, TOLERANCE)
        where = "the package" if actual is None else "the model"
        return TensorComparison(kind, name, float("inf"), TOLERANCE, f"{where} has none")
    if actual.dtype != reference.dtype:
        names = [str(tensor.dtype).removeprefix("torch.") for tensor in (actual, reference)]
        return TensorComparison(kind, name, float("inf"), TOLERANCE, f"{names[0]}, and {names[1]} in the model")
    if actual.shape != reference.shape:
        problem = f"{list(actual.shape)}, and {list(reference.shape)} in the model"
        return TensorComparison(kind, name, float("inf"), TOLERANCE, problem)
    tolerance = 0.0 if kind == "weight" else _tolerance(actual.dtype)
    if torch.equal(actual, reference):  # the usual case; the rest makes copies
        return TensorComparison(kind, name, 0.0, tolerance)
    first, second = _double(actual), _double(reference)
    # The difference of equal infinities, as in a mask, is 0.
    difference = torch.where(first == second, 0.0, first - second).abs()
    greatest = float(difference.max()) if difference.numel() else 0.0
    return TensorComparison(kind, name, greatest / max(largest(reference), floor, 1e-30), tolerance)


def within_rounding(comparison: TensorComparison, rounding: float) -> TensorComparison:
    """The same with a tolerance of what rounding does to this tensor: that of a loss may be all there is of it.

    Args:
        comparison: what differs.
        rounding: the relative change of the model's tensor that one unit in the last place of weights and inputs makes.
    """
    if not (isfinite(comparison.difference) and isfinite(rounding) and comparison.tolerance):
        return comparison
    most = float("inf") if comparison.kind == "loss" else min(_MOST, 100 * comparison.tolerance)
    return replace(comparison, tolerance=max(comparison.tolerance, min(_SAFETY * rounding, most)))


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude of the finite values; nan if there is a nan, 0 without finite values."""
    if tensor.is_floating_point() and tensor.numel():
        magnitude = float(tensor.detach().abs().max())
        if not isinf(magnitude):
            return magnitude
    values = _double(tensor).abs()
    if values.isnan().any():
        return nan
    values = values[~values.isinf()]
    return float(values.max()) if values.numel() else 0.0


def _tolerance(dtype: torch.dtype) -> float:
    exact = not (dtype.is_floating_point or dtype.is_complex)
    return 0.0 if exact else max(TOLERANCE, 8 * torch.finfo(dtype).eps)


def _double(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()
