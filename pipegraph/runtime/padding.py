"""`pad_to`: lengths of microbatches are rounded up, so that kernels for static shapes serve more of them.

tokens [2, 13], mask [2, 13], labels [2, 13]   pad_to={"seq": 8}   tokens, mask [2, 16] with zeros, labels with -100
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor
from torch.nn import functional

from pipegraph.errors import ArgumentError, BatchError, nearest
from pipegraph.package import Manifest, Value
from pipegraph.package.sizes import BATCH
from pipegraph.runtime.batch import StepBatch
from pipegraph.torch_private.pytrees import pytree

IGNORED: Final = -100
"""The label that `torch.nn.functional.cross_entropy` leaves out."""


@dataclass(frozen=True)
class Padding:
    """The sizes that are rounded up.

    Attributes:
        multiples: name of a size → the number that it is rounded up to a multiple of.
    """

    multiples: Mapping[str, int] = field(default_factory=dict)

    def check(self, manifest: Manifest) -> None:
        """Raise ArgumentError for a size that the package does not have, or a multiple below 1."""
        for name, multiple in self.multiples.items():
            sizes = [size for size in manifest.sizes if size != BATCH]
            if name not in sizes:
                raise ArgumentError(
                    f"pad_to names {name!r}, which is not a dynamic size other than the rows.{nearest(name, sizes)}",
                    f"{', '.join(sizes) or 'without pad_to'}.",
                )
            if type(multiple) is not int or multiple < 1:
                raise ArgumentError(f"pad_to cannot have {multiple!r} for {name}.", "a whole number from 1 on.")

    def pad(self, manifest: Manifest, batch: StepBatch) -> StepBatch:
        """Return the batch with inputs that end in zeros, and a target that ends in `IGNORED`.

        Raises:
            BatchError: an input requires a gradient, or the target has floats along a size that is padded.
        """
        if not self.multiples:
            return batch
        inputs = {name: self._padded_input(manifest.values[name], tensors) for name, tensors in batch.inputs.items()}
        if not isinstance(batch.target, list):
            return replace(batch, inputs=inputs, target=self._padded_target(manifest, batch, batch.target, None))
        targets = [self._padded_target(manifest, batch, item, index) for index, item in enumerate(batch.target)]
        return replace(batch, inputs=inputs, target=targets)

    def _padded_input(self, value: Value, tensors: Any) -> Any:
        if isinstance(tensors, list):
            return [self._padded_input(value, tensor) for tensor in tensors]
        if not isinstance(tensors, Tensor) or tensors.dim() != len(value.shape):
            return tensors  # it is refused later
        ends = [
            self._missing(size, tensors.shape[dim]) if isinstance(size, str) else 0
            for dim, size in enumerate(value.shape)
        ]
        if not any(ends):
            return tensors
        if tensors.requires_grad:
            raise BatchError(
                f"{value.name} requires a gradient, and pad_to pads it.", "pad it before the step, without pad_to."
            )
        return _with_ends(tensors, ends, 0)

    def _missing(self, name: str, length: int) -> int:
        return -length % self.multiples.get(name, 1)

    def _padded_target(self, manifest: Manifest, batch: StepBatch, target: Any, index: int | None) -> Any:
        """The target of the batch, or of one microbatch, padded along the dimensions with the lengths of inputs."""
        lengths: dict[int, int] = {}  # length → its padding
        for name, tensors in batch.inputs.items():
            tensor = tensors[index] if isinstance(tensors, list) and index is not None else tensors
            for dim, size in enumerate(manifest.values[name].shape if isinstance(tensor, Tensor) else ()):
                if size in self.multiples and dim < tensor.dim():
                    lengths[tensor.shape[dim]] = self._missing(str(size), tensor.shape[dim])

        def padded(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            ends = [0, *(lengths.get(length, 0) for length in leaf.shape[1:])][: leaf.dim()]
            if not any(ends):
                return leaf
            if leaf.is_floating_point() or leaf.is_complex():
                raise BatchError(
                    f"the target has floats of the shape {list(leaf.shape)}, and pad_to has no number that a loss "
                    f"leaves out.",
                    f"integers with {IGNORED}, or a batch that is padded before the step.",
                    is_of_target=True,
                )
            return _with_ends(leaf, ends, IGNORED)

        return pytree.tree_map(padded, target)


NO_PADDING: Final = Padding()


def _with_ends(tensor: Tensor, ends: list[int], value: int) -> Tensor:
    """The tensor with a number of elements added at the end of each dimension."""
    amounts = [amount for end in reversed(ends) for amount in (0, end)]
    return functional.pad(tensor, amounts, value=value)
