"""How far the tensors of a package are from those of its model."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan

import torch
from torch import Tensor


def difference(reference: Mapping[str, Tensor | None], candidate: Mapping[str, Tensor | None]) -> float:
    """The largest difference of two sets of tensors, each relative to its largest value in the reference.

    Infinite if a tensor is missing, or has another shape or dtype. None stands for zeros.
    """
    if reference.keys() != candidate.keys():
        return inf
    # A tensor that is zero but for rounding, such as the gradient of an attention's key bias, is compared with the
    # largest value of all.
    floor = max((_largest(tensor) for tensor in reference.values() if tensor is not None), default=0.0) / 1000
    return max((_relative(reference[name], candidate[name], floor) for name in reference), default=0.0)


def rounding(reference: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None]) -> float:
    """How far a model is from itself in float64: a package that sums in another order is as far from the model.

    Args:
        reference: tensors of the model in its dtype.
        exact: the same of the model in float64.
    """
    like = {
        name: None if value is None or exact_tensor is None else exact_tensor.to(value.dtype)
        for (name, value), exact_tensor in zip(reference.items(), exact.values(), strict=True)
    }
    return difference(reference, like)


def _relative(reference: Tensor | None, candidate: Tensor | None, floor: float) -> float:
    if reference is None or candidate is None:
        present = candidate if reference is None else reference
        return 0.0 if present is None or not present.any() else inf
    if reference.shape != candidate.shape or reference.dtype != candidate.dtype:
        return inf
    if torch.equal(reference, candidate):
        return 0.0
    if not (reference.is_floating_point() or reference.is_complex()):
        return inf
    first, second = _double(reference), _double(candidate)
    apart = torch.where((first == second) | (first.isnan() & second.isnan()), 0.0, first - second).abs()
    largest = float(apart.max()) / max(_largest(reference), floor, 1e-30)
    return inf if isnan(largest) else largest


def _largest(tensor: Tensor) -> float:
    values = _double(tensor)
    return float(torch.where(values.isfinite(), values, 0.0).abs().max()) if values.numel() else 0.0


def _double(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()
