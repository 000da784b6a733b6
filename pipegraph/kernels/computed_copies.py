"""Copies of a stage's tensors in fewer bits, with which kernels compute.

.parameters (float32) ─ once per step ─▶ copies (bfloat16) ─▶ F, I, W ─▶ gradients (bfloat16)
      ▲                                                                        │
      └── optimizer ◀── .grad (float32) ◀────────── added up ◀─────────────────┘

So modules, optimizers, checkpoints and reductions between ranks see float32 alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from pipegraph.kernels.internals import copy_all, version
from pipegraph.kernels.sharded import local


class ComputedCopies:
    """The tensors that a stage computes with.

    Args:
        stage: whose tensors of floats have copies.
        dtype: of the copies.
        kept: the names of the tensors that the stage computes with as they are.
    """

    def __init__(self, stage: nn.Module, dtype: torch.dtype, kept: Collection[str]) -> None:
        self._stage, self._dtype, self._kept = stage, dtype, frozenset(kept)
        self._of: list[Tensor] = []
        self._copies: list[Tensor | None] = []

    def renew(self, tensors: Iterable[Tensor]) -> None:
        """Take over what the tensors are now, those of the stage and others."""
        with torch.inference_mode(False), torch.no_grad():  # a step after an evaluation trains with the same copies
            self._renew(list(tensors))

    def _renew(self, tensors: list[Tensor]) -> None:
        if [id(each) for each in tensors] != [id(each) for each in self._of]:
            named = (*self._stage.named_parameters(), *self._stage.named_buffers())
            copied = {id(each) for name, each in named if name not in self._kept and each.is_floating_point()}
            self._copies = [self._copy(each) if id(each) in copied else None for each in tensors]
            self._of = tensors
        pairs = [(copy, local(each)) for each, copy in zip(tensors, self._copies, strict=True) if copy is not None]
        if pairs:
            copy_all(*(list(each) for each in zip(*pairs, strict=True)))
        for each, copy in zip(tensors, self._copies, strict=True):
            if copy is not None:
                copy.requires_grad_(each.requires_grad)

    def tensors(self) -> list[Tensor]:
        """The tensors as they are computed with, in order. Of a DTensor it is the part of this rank."""
        return [local(each) if copy is None else copy for each, copy in zip(self._of, self._copies, strict=True)]

    def versions(self) -> list[int]:
        """How often each has been written to."""
        return [version(each) for each in self.tensors()]

    def write_back(self, places: Iterable[int]) -> None:
        """Give tensors that a forward has written to, such as running means, what it has written.

        Places behind those of the tensors are of its inputs and its target, which have no copies.
        """
        for place in places:
            copy = self._copies[place] if place < len(self._copies) else None
            if copy is not None:
                local(self._of[place]).copy_(copy)

    def _copy(self, tensor: Tensor) -> Tensor | None:
        own = local(tensor.detach())
        return None if own.dtype == self._dtype else torch.empty_like(own, dtype=self._dtype)


def written(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The places of what was written to in between, by two calls of `versions`."""
    return [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
