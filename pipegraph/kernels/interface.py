"""The interface between the runtime and a stage's kernels, the same for every kind of kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Loss = Callable[[tuple[Tensor, ...], Any], Any]
"""(the stage's outputs, one microbatch's target) → a loss without dimensions, or (loss, metrics): tensors by name, also
without dimensions."""

Dynamic = bool | Literal["auto"]
"""Whether kernels are for all sizes; "auto" for those that are made when a second shape arrives."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The result of one microbatch's forward.

    Attributes:
        outputs: detached.
        loss: detached; None if none was asked for.
        metrics: what the loss function returned with the loss, detached.
        saved: what the backward needs, in a form of the kernels' own. The caller keeps it from F to the end of B or W,
            so activations live as long as the schedule needs them.
        is_pure: a promise that only `outputs`, `loss`, `metrics`, `saved` and gradients of inputs hold memory of the
            inputs and of the gradients that the backward is given. `.grad` does not, and no Python code of the module
            has seen them. The caller may then overwrite that memory.
    """

    outputs: tuple[Tensor, ...]
    loss: Tensor | None
    saved: Any
    is_pure: bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class StageKernels(Protocol):
    """F, I, W and B of one stage, without state between microbatches.

    The gradients of outputs are given in the order of the stage's outputs, then that of the loss if there is one; None
    for an output that nothing used. The gradients of inputs are returned in the order of the inputs; None for an input
    that needs none or had no part. Gradients of parameters are added to `.grad` as `Tensor.backward` does.
    """

    def begin(self) -> None:
        """Compare stage and loss with the last step. Called before each step."""
        return

    def retrace(self) -> None:
        """Forget what was traced: the next call traces the stage and its loss again. Not called within a step."""
        return

    def prepare(self, inputs: Sequence[Any], *, target: Any, with_loss: bool, differentiable: bool, kinds: str) -> None:
        """Compile what a step needs, ahead of its first action.

        Optional: otherwise each kernel is compiled at its first call, rank after rank along the pipeline. An error of
        the stage or the loss is left for `forward` to raise.

        Args:
            inputs, target, with_loss, differentiable: arguments like those of `forward` in the step.
            kinds: some of F, I, W and B.
        """
        return

    def forward(
        self, inputs: Sequence[Any], *, target: Any = None, with_loss: bool = False, differentiable: bool = True
    ) -> Forward:
        """Run F, and with `with_loss` the loss of its outputs and `target`. Unless `differentiable`, save nothing."""
        ...

    def backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run B: return the gradients of the inputs, and accumulate those of the parameters."""
        ...

    def input_backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run I: return the gradients of the inputs. W follows with the same `saved`."""
        ...

    def weight_backward(self, saved: Any) -> None:
        """Run W, once after I: accumulate the gradients of the parameters."""
        ...


@runtime_checkable
class SizedKernels(Protocol):
    """Kernels that want to know which dimensions of the inputs are sizes. Others learn it from the shapes they see."""

    def name_dimensions(self, shapes: Sequence[Sequence[int | str]]) -> None:
        """Take over what is known of each input's dimensions: a number never changes, a name is that of a size.

        Called once, before all else.
        """
        ...


@runtime_checkable
class OffloadedValues(Protocol):
    """A `Forward.saved` of which something may wait for the backward elsewhere."""

    def take_offloaded(self, device: torch.device) -> dict[str, Tensor]:
        """Take out what is on this device and is to wait in CPU memory; empty if nothing is."""
        ...

    def put_back(self, values: Mapping[str, Tensor]) -> None:
        """Put in again what was taken out, before the first part of the backward."""
        ...


class DrawKeys(Protocol):
    """Where kernels find the keys of their random numbers, in the place of torch's generators."""

    def key(self, module: str, number: int) -> int:
        """The key of a draw of the forward that runs now: an odd number of 64 bits, with a sign.

        Args:
            module: the module that draws, as the stage names it.
            number: how many draws it has made before in this forward.
        """
        ...


@runtime_checkable
class SeededKernels(Protocol):
    """Kernels whose random numbers can be seeded."""

    def draw_from(self, keys: DrawKeys) -> None:
        """Take all random numbers from these keys. Called once, before all else."""
        ...


@runtime_checkable
class LowPrecisionKernels(Protocol):
    """Kernels that can compute in another dtype than that of the stage's parameters."""

    def compute_in(self, dtype: torch.dtype, uncast_names: Collection[str]) -> None:
        """Compute with copies of the stage's tensors of floats in this dtype, and add gradients up in their own.

        Called once, before all else.

        Args:
            uncast_names: the names of the tensors that the stage computes with as they are.
        """
        ...
