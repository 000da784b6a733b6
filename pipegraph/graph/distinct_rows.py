"""A batch of rows that all differ, derived from the example of a model: what shows whether rows are mixed up.

An example often repeats one row, and its attention mask is often all ones. A batch of such rows computes the same
values however it is cut. The rows here differ from those of the example and from one another, and are as valid:

    tensor                          row of the batch
    floats                          a row of the example plus noise, within the range of the example
    floats of two values            as integers: they are a mask, or labels
    floats of a single value        that value times seeded factors; zeros become small numbers
    integers, booleans              a row of the example, rolled along its last dimension: each special token occurs as
                                    often as before
    ones (an attention mask)        zeros in a tail of another length for each row, which is full in row 0
    all False (a padding mask)      True in such a tail
    0, 1, 2, … in each row          unchanged: position ids
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def distinct_rows(leaves: Sequence[Any], dims: Sequence[int | None], rows: int, seed: int = 0) -> list[Any]:
    """Return the leaves with a number of rows that differ from one another.

    Row ``r`` of every tensor is derived from row ``r % n`` of the ``n`` rows of the example. The result depends on the
    arguments alone, and shares no memory with them.

    Args:
        leaves: of the example. What is not a tensor is returned unchanged.
        dims: the batch dimension of each leaf; None for a leaf without rows, which is copied.
        rows: of the batch.
        seed: of the noise.

    Raises:
        ValueError: a tensor has another number of rows than the others, and not a multiple of it.
    """
    lengths = [
        leaf.shape[dim]
        for leaf, dim in zip(leaves, dims, strict=True)
        if isinstance(leaf, Tensor) and dim is not None and leaf.shape[dim]
    ]
    example = min(lengths, default=1)
    generator = torch.Generator().manual_seed(seed)
    return [
        _rows_of(leaf, dim, example, rows, generator) if isinstance(leaf, Tensor) else leaf
        for leaf, dim in zip(leaves, dims, strict=True)
    ]


def _rows_of(tensor: Tensor, dim: int | None, example: int, rows: int, generator: torch.Generator) -> Tensor:
    if dim is None or tensor.numel() == 0:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if tensor.shape[dim] % example:
        raise ValueError(f"a tensor has {tensor.shape[dim]} rows, and another one {example}")
    # Several entries for a row, as in [batch * heads, …], are one row: [batch, heads, …].
    first = tensor.detach().unflatten(dim, (example, -1)).movedim(dim, 0)
    batch = _distinct(first, rows, generator)
    joined = batch.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    return joined.requires_grad_(tensor.requires_grad)


def _distinct(example: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """The rows of one tensor, whose rows are along dimension 0."""
    repeated = example[torch.arange(rows, device=example.device) % len(example)]
    if example.is_complex():
        return repeated + _noise(repeated.abs().std(correction=0), repeated, generator)
    if example.is_floating_point():
        least, most = example.amin(), example.amax()
        if least == most and (most != 1 or _last_dim(example) is None):
            return _of_one_value(repeated, generator)
        if not bool(((example == least) | (example == most)).all()):
            return _with_noise(repeated, least, most, generator)
    elif _are_positions(example):
        return repeated
    if bool((example == 1).all()):
        return _with_tails(repeated, 0)
    if example.dtype == torch.bool and not bool(example.any()):
        return _with_tails(repeated, 1)
    return _rolled(example, repeated)


def _with_noise(repeated: Tensor, least: Tensor, most: Tensor, generator: torch.Generator) -> Tensor:
    """Rows plus noise of half their own scale, within the range of the example: a probability stays one."""
    values = repeated.float() if repeated.element_size() < 4 else repeated
    finite = torch.where(values.isfinite(), values, 0)
    inner = list(range(1, values.dim()))
    scale = finite.std(dim=inner, correction=0, keepdim=True) if finite[0].numel() > 1 else finite.std(correction=0)
    noisy = values + _noise(scale / 2, values, generator)
    return noisy.clamp(least.to(values.dtype), most.to(values.dtype)).to(repeated.dtype)


def _of_one_value(repeated: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of one value, scaled by factors between 1/2 and 1; numbers between 0 and 1/2 for zeros."""
    factors = torch.rand(repeated.shape, generator=generator).to(repeated.device) / 2
    values = torch.where(repeated == 0, factors.to(repeated.dtype), repeated * (0.5 + factors).to(repeated.dtype))
    return torch.where(repeated.isfinite(), values, repeated)


def _noise(scale: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    dtype = torch.complex64 if like.is_complex() else torch.float32
    return scale * torch.randn(like.shape, generator=generator, dtype=dtype).to(like.device, like.dtype)


def _with_tails(repeated: Tensor, value: int) -> Tensor:
    """Rows with a value at the end, at another number of places in each row. Row 0 and the first place stay."""
    dim = _last_dim(repeated)
    if dim is None:
        return repeated
    rows, length = len(repeated), repeated.shape[dim]
    tails = torch.arange(rows, device=repeated.device) * max(1, length // rows) % length
    shape = [1] * repeated.dim()
    shape[0] = rows
    places = torch.arange(length, device=repeated.device).view([-1] + [1] * (repeated.dim() - 1 - dim))
    return torch.where(places >= length - tails.view(shape), torch.full_like(repeated, value), repeated)


def _rolled(example: Tensor, repeated: Tensor) -> Tensor:
    """Rows rolled along their last dimension, each by another number of places; rows of one entry in another order."""
    dim = _last_dim(repeated)
    if dim is None:
        number = torch.arange(len(repeated), device=repeated.device)
        return example[(number + 1 + number // len(example)) % len(example)]
    places = 1 + torch.arange(len(repeated)) % (repeated.shape[dim] - 1)
    return torch.stack([row.roll(int(by), dim - 1) for row, by in zip(repeated, places, strict=True)])


def _last_dim(tensor: Tensor) -> int | None:
    """The last dimension inside a row that has more than one entry."""
    return next((dim for dim in range(tensor.dim() - 1, 0, -1) if tensor.shape[dim] > 1), None)


def _are_positions(tensor: Tensor) -> bool:
    """Return whether each row counts up by 1 along its last dimension."""
    if tensor.dtype == torch.bool or tensor.dim() < 2 or tensor.shape[-1] < 3:
        return False
    return bool((tensor[..., 1:] == tensor[..., :-1] + 1).all())
