"""What F of a traced stage leaves to the backward of the same microbatch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipegraph.kernels.cuda_graphs.microbatch_graphs import MicrobatchGraphs, Values
from pipegraph.kernels.graphs.block_operation import GradientMask
from pipegraph.kernels.module_state import with_strides
from pipegraph.kernels.stage_variant import StageVariant
from pipegraph.kernels.symbolic.symbolic_sizes import Numbers


class SavedValues:
    """The values that the backward of one microbatch reads, by name. After I: those that W reads.

    Attributes:
        mask: for which outputs a gradient has arrived.
        arrived: the names of these gradients, until a kernel has read them.
        graphs: the CUDA graphs that hold the memory of all other values; None if kernels are launched one by one.
        replayed: the key of the graph of I if it has computed the values; None if F has.
    """

    __slots__ = ("__weakref__", "arrived", "graphs", "mask", "numbers", "replayed", "values", "variant")

    def __init__(
        self, variant: StageVariant, numbers: Numbers, values: Values, graphs: MicrobatchGraphs | None = None
    ) -> None:
        self.variant, self.numbers, self.values, self.graphs = variant, numbers, values, graphs
        self.mask: GradientMask = ()
        self.arrived: tuple[str, ...] = ()
        self.replayed: Any = None
        if graphs is not None:
            graphs.used_by(self)

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of the stage's outputs, and of its loss."""
        results, tangents = self.variant.results, self.variant.divided.joint.tangents
        of_tensors = [gradients[index] for index, result in enumerate(results) if isinstance(result, int)]
        of_tensors += gradients[len(results) :]
        of_tensors += [None] * (len(tangents) - len(of_tensors))
        pairs = list(zip(tangents, of_tensors, strict=True))
        self.mask = tuple(node is not None and gradient is not None for node, gradient in pairs)
        arrived = [(node, gradient) for node, gradient in pairs if node is not None and gradient is not None]
        for node, gradient in arrived:
            self.values[node.name] = with_strides(gradient, self.variant.divided.strides(node, self.numbers))
        self.arrived = tuple(node.name for node, _ in arrived)

    def take_offloaded(self, device: torch.device) -> dict[str, Tensor]:
        """Take out what is to wait for the backward in CPU memory; empty if nothing is."""
        names = sorted(self.variant.divided.offloaded & self.values.keys())
        # Some kernels of a GPU return a seed on the host, of which the graph says that it is on the GPU.
        return {name: self.values.pop(name) for name in names if self.values[name].device == device}

    def put_back(self, values: Mapping[str, Tensor]) -> None:
        """Put in again what was taken out."""
        self.values |= values


def held_tensors(saved: Any) -> Collection[Tensor] | None:
    """Return the tensors that a `Forward.saved` keeps in memory now, or None if autograd keeps them: it hides them."""
    return saved.values.values() if isinstance(saved, SavedValues) else None
