"""Kernels that call the stage's module and let autograd differentiate it: for stages that cannot be traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipegraph.errors import PipegraphError
from pipegraph.kernels.interface import Forward, Loss


@dataclass(frozen=True, slots=True)
class _Saved:
    """The ends of one microbatch's graph. An edge, unlike the output, does not keep the output's memory."""

    leaves: tuple[Tensor | None, ...]
    edges: tuple[GradientEdge | None, ...]


class AutogradKernels:
    """F is `stage(*inputs)` with a graph, B its backward.

    Autograd cannot divide a backward without walking the shared part twice, so I does the whole of B and W nothing:
    a zero-bubble schedule gives the right gradients, and no better times than 1F1B.
    """

    def __init__(
        self,
        stage: nn.Module,
        input_gradients: Sequence[bool],
        output_gradients: Sequence[bool],
        loss: Loss | None = None,
    ) -> None:
        self._stage = stage
        self._input_gradients = tuple(input_gradients)
        self._output_gradients = tuple(output_gradients)
        self._loss = loss

    def forward(
        self, inputs: Sequence[Any], *, target: Any = None, with_loss: bool = False, differentiable: bool = True
    ) -> Forward:
        # A leaf of its own for each input, so that the graph of this microbatch ends here.
        leaves = tuple(
            value.detach().requires_grad_() if wanted and differentiable else None
            for value, wanted in zip(inputs, self._input_gradients, strict=True)
        )
        with torch.set_grad_enabled(differentiable):
            returned = self._stage(
                *(value if leaf is None else leaf for value, leaf in zip(inputs, leaves, strict=True))
            )
            outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
            loss = self._scalar_loss(outputs, target) if with_loss else None
            self._check_gradients(outputs)
        ends = outputs if loss is None else (*outputs, loss)
        saved = _Saved(leaves, tuple(map(_edge, ends))) if differentiable else None
        return Forward(tuple(map(_detached, outputs)), None if loss is None else loss.detach(), saved)

    def backward(self, saved: _Saved, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(saved.edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if pairs:  # nothing here requires a gradient in a stage that is frozen, as are all before it
            edges, arrived = zip(*pairs, strict=True)
            torch.autograd.backward(edges, arrived)
        return tuple(None if leaf is None else leaf.grad for leaf in saved.leaves)

    def input_backward(self, saved: _Saved, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return self.backward(saved, gradients)

    def weight_backward(self, saved: _Saved) -> None:
        pass

    def _check_gradients(self, outputs: tuple[Tensor, ...]) -> None:
        for position, (output, comes) in enumerate(zip(outputs, self._output_gradients, strict=False)):
            if not comes and _requires_grad(output):
                raise PipegraphError(
                    f"output {position} of the stage needs a gradient, and pipeline.json says that none comes back "
                    f"(requires_grad false): what made it would not be trained. Were its parameters frozen when the "
                    f"model was split? Freeze them, or split the model again with them trainable."
                )

    def _scalar_loss(self, outputs: tuple[Tensor, ...], target: Any) -> Tensor:
        if self._loss is None:
            raise PipegraphError("a loss was asked of a stage that has none: give Pipeline a loss_fn.")
        loss = self._loss(outputs, target)
        trained = torch.is_grad_enabled() and any(map(_requires_grad, outputs))
        if trained and isinstance(loss, Tensor) and not loss.requires_grad:
            raise PipegraphError(
                "loss_fn returned a tensor without a gradient, so nothing would be trained.\n"
                "Try: compute it from the output with tensor operations, without detach() or no_grad."
            )
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise PipegraphError(f"loss_fn(output, target) returned {found}; a step needs one number: take its mean.")
        return loss


def _requires_grad(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad


def _edge(output: Any) -> GradientEdge | None:
    return get_gradient_edge(output) if _requires_grad(output) else None


def _detached(output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output
