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

from pipegraph.kernels.sharded import local
from pipegraph.torch_private.tensors import copy_all
from pipegraph.torch_private.tensors import version_of as version


class ComputedCopies:
    """The tensors that a stage computes with.

    Args:
        stage: whose tensors of floats have copies.
        dtype: of the copies.
        uncast_names: the names of the tensors that the stage computes with as they are.
    """

    def __init__(self, stage: nn.Module, dtype: torch.dtype, uncast_names: Collection[str]) -> None:
        self._stage, self._dtype, self._uncast_names = stage, dtype, frozenset(uncast_names)
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor | None] = []

    def renew(self, tensors: Iterable[Tensor]) -> None:
        """Take over what the tensors are now, those of the stage and others."""
        with torch.inference_mode(False), torch.no_grad():  # a step after an evaluation trains with the same copies
            self._renew(list(tensors))

    def _renew(self, tensors: list[Tensor]) -> None:
        if [id(tensor) for tensor in tensors] != [id(tensor) for tensor in self._tensors]:
            named = (*self._stage.named_parameters(), *self._stage.named_buffers())
            copied = {
                id(tensor) for name, tensor in named if name not in self._uncast_names and tensor.is_floating_point()
            }
            self._copies = [self._copy(tensor) if id(tensor) in copied else None for tensor in tensors]
            self._tensors = tensors
        pairs = [(copy, local(tensor)) for tensor, copy in zip(tensors, self._copies, strict=True) if copy is not None]
        if pairs:
            copy_all(*(list(column) for column in zip(*pairs, strict=True)))
        for original, copy in zip(tensors, self._copies, strict=True):
            if copy is not None:
                copy.requires_grad_(original.requires_grad)

    def tensors(self) -> list[Tensor]:
        """The tensors as they are computed with, in order. Of a DTensor it is the part of this rank."""
        return [
            local(tensor) if copy is None else copy for tensor, copy in zip(self._tensors, self._copies, strict=True)
        ]

    def versions(self) -> list[int]:
        """How often each has been written to."""
        return [version(tensor) for tensor in self.tensors()]

    def write_back(self, places: Iterable[int]) -> None:
        """Copy values that a forward has written, such as running means, from the copies to the tensors.

        Places after those of the tensors are its inputs and its target, which have no copies.
        """
        for place in places:
            copy = self._copies[place] if place < len(self._copies) else None
            if copy is not None:
                local(self._tensors[place]).copy_(copy)

    def _copy(self, tensor: Tensor) -> Tensor | None:
        shard = local(tensor.detach())
        return None if shard.dtype == self._dtype else torch.empty_like(shard, dtype=self._dtype)


def written(old_versions: Sequence[int], new_versions: Sequence[int]) -> list[int]:
    """The places of what was written to in between, by two calls of `versions`."""
    return [place for place, (old, new) in enumerate(zip(old_versions, new_versions, strict=True)) if old != new]
