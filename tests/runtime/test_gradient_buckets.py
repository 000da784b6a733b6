"""Gradients that are reduced together."""

from __future__ import annotations

import torch
from torch import nn

from pipegraph.runtime.gradient_buckets import BUCKET_BYTES, GradientBucket, buckets


def parameter(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
    weight.grad = torch.arange(weight.numel(), dtype=dtype).view(shape) if grad else None
    return weight


def test_what_was_reduced_becomes_the_gradients_without_a_copy() -> None:
    first, second = parameter(2, 3), parameter(4)
    bucket = GradientBucket([first, second])
    assert first.grad is None and second.grad is None  # no gradient is held twice
    assert bucket.flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 1, 1]
    bucket.flat.mul_(2)
    bucket.give_back()
    assert first.grad is not None and first.grad.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert second.grad is not None and second.grad.tolist() == [0, 2, 4, 6]
    storage = bucket.flat.untyped_storage().data_ptr()
    assert {leaf.grad.untyped_storage().data_ptr() for leaf in (first, second) if leaf.grad is not None} == {storage}


def test_a_gradient_that_no_rank_has_stays_none() -> None:
    """The numbers at the end say how many ranks have one: here another rank has the second, and nobody the third."""
    parameters = [parameter(2), parameter(2, grad=False), parameter(1, grad=False)]
    bucket = GradientBucket(parameters)
    bucket.flat += torch.tensor([0.0, 0, 5, 6, 0, 1, 1, 0])
    bucket.give_back()
    assert [None if leaf.grad is None else leaf.grad.tolist() for leaf in parameters] == [[0, 1], [5, 6], None]


def test_gradients_keep_the_memory_layout_of_parameters() -> None:
    weight = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    gradient = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    weight.grad = gradient.clone(memory_format=torch.preserve_format)
    bucket = GradientBucket([weight])
    bucket.give_back()
    assert weight.grad is not None and torch.equal(weight.grad, gradient) and weight.grad.stride() == weight.stride()


def test_buckets_have_one_dtype_and_end_when_they_are_full() -> None:
    full = nn.Parameter(torch.empty(BUCKET_BYTES // 4, device="meta"))
    small, half = parameter(3), parameter(3, dtype=torch.bfloat16)
    identities = [[id(member) for member in bucket] for bucket in buckets([small, full, half, small, small])]
    assert identities == [[id(small), id(full)], [id(half)], [id(small), id(small)]]
    assert list(buckets([])) == []
