"""What the runtime asks of a stage's kernels, whichever way they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Loss = Callable[[tuple[Tensor, ...], Any], Tensor]
"""(the stage's outputs, one microbatch's target) → a loss of no dimensions."""


@dataclass(frozen=True, slots=True)
class Forward:
    """What the forward of one microbatch gives.

    `outputs` and `loss` are detached. `saved` is what the backward needs, and belongs to the kernels: the caller keeps
    it from F to the end of B, or of W, and lets it go, so that activations live as long as the schedule needs them.
    """

    outputs: tuple[Tensor, ...]
    loss: Tensor | None
    saved: Any


class StageKernels(Protocol):
    """F, I, W and B of one stage, without state between microbatches.

    Gradients of outputs come in the order of the stage's outputs, with that of the loss as one more at the end where a
    loss was asked for; None stands for an output that nothing used. Gradients of inputs go out in the order of the
    inputs; None stands for an input that needs none, or did not take part. Gradients of parameters are added to
    `.grad` as `Tensor.backward` would.
    """

    def begin(self) -> None:
        """Before each step: look for what has changed in stage and loss since the last one."""
        ...

    def prepare(self, inputs: Sequence[Any], *, target: Any, with_loss: bool, differentiable: bool, kinds: str) -> None:
        """Compile what a step needs, of `kinds` (some of F, I, W and B), for arguments like these of `forward`.

        Not needed: what was not prepared is compiled when it is first called, rank after rank along the pipeline.
        What is wrong with stage or loss is left for `forward` to say.
        """
        ...

    def forward(
        self, inputs: Sequence[Any], *, target: Any = None, with_loss: bool = False, differentiable: bool = True
    ) -> Forward:
        """F. With `with_loss`, the loss of the outputs and `target` too; `saved` is None unless `differentiable`."""
        ...

    def backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """B: the gradients of the inputs; those of the parameters are accumulated."""
        ...

    def input_backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """I: the gradients of the inputs. W follows with the same `saved`, which holds what it needs."""
        ...

    def weight_backward(self, saved: Any) -> None:
        """W, once after I: the gradients of the parameters are accumulated."""
        ...
