"""Two tensors compared: how far one is from the other, and whether that is more than rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite, isinf, nan

import torch
from torch import Tensor

TOLERANCE = 1e-5
"""Relative, in float32; eight units in the last place for coarser formats, and none for integers."""

_SAFETY = 16
"""How many times the effect of one unit in the last place of weights and inputs counts as rounding."""
_MOST = 0.1
"""A difference above it is none of rounding, but of a loss, which may be a sum of what is much larger."""


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
    kind: str, reference: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]
) -> Iterator[TensorComparison]:
    """Compare all tensors of a kind.

    A difference is relative to a thousandth of the largest value of them all at least: a tensor that is zero but for
    rounding, such as the gradient of an attention's key bias, is then not reported.
    """
    floor = max((largest(tensor) for tensor in reference.values() if tensor is not None), default=0.0) / 1000
    for name in dict.fromkeys([*reference, *found]):
        yield compare(kind, name or kind, found.get(name), reference.get(name), floor)


def compare(
    kind: str, name: str, found: Tensor | None, reference: Tensor | None, floor: float = 0.0
) -> TensorComparison:
    """Compare the largest difference of two tensors with the reference's largest value. A missing gradient is zero."""
    if found is None and reference is None:
        return TensorComparison(kind, name, 0.0, TOLERANCE)
    if found is None or reference is None:
        present = reference if found is None else found
        assert present is not None
        if kind == "gradient" and largest(present) == 0:
            return TensorComparison(kind, name, 0.0, TOLERANCE)
        where = "the package" if found is None else "the model"
        return TensorComparison(kind, name, float("inf"), TOLERANCE, f"{where} has none")
    if found.dtype != reference.dtype:
        names = [str(each.dtype).removeprefix("torch.") for each in (found, reference)]
        return TensorComparison(kind, name, float("inf"), TOLERANCE, f"{names[0]}, and {names[1]} in the model")
    if found.shape != reference.shape:
        problem = f"{list(found.shape)}, and {list(reference.shape)} in the model"
        return TensorComparison(kind, name, float("inf"), TOLERANCE, problem)
    tolerance = 0.0 if kind == "weight" else _tolerance(found.dtype)
    if torch.equal(found, reference):  # the usual case; the rest makes copies
        return TensorComparison(kind, name, 0.0, tolerance)
    first, second = _double(found), _double(reference)
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
    """Return the largest magnitude of the finite values; nan if there is a nan, 0 if there are none."""
    if tensor.is_floating_point() and tensor.numel():
        found = float(tensor.detach().abs().max())
        if not isinf(found):
            return found
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
