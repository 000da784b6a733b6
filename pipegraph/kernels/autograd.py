"""Kernels that call the stage's module and let autograd differentiate it: for stages that cannot be traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipegraph.kernels.interface import Forward, Loss, StageKernels
from pipegraph.kernels.loss import check_gradients, compute_loss, explained_without_target, requires_grad
from pipegraph.kernels.sharded import check_outputs, waited


@dataclass(frozen=True, slots=True)
class _GraphEnds:
    """The ends of one microbatch's graph. An edge does not keep the memory of its output."""

    leaves: tuple[Tensor | None, ...]
    edges: tuple[GradientEdge | None, ...]


class AutogradKernels(StageKernels):
    """F calls the stage with a graph, B is its backward.

    Autograd cannot divide a backward without walking the shared part twice, so I does all of B, and W nothing: a
    zero-bubble schedule gives the right gradients, in the time of 1F1B.
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
        # Each input becomes a leaf: the graph of this microbatch ends here.
        leaves = tuple(
            value.detach().requires_grad_() if wanted and differentiable else None
            for value, wanted in zip(inputs, self._input_gradients, strict=True)
        )
        with torch.set_grad_enabled(differentiable):
            returned = self._stage(
                *(value if leaf is None else leaf for value, leaf in zip(inputs, leaves, strict=True))
            )
            outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
            check_outputs(outputs)
            with explained_without_target(target):
                loss, metrics = compute_loss(self._loss, outputs, target) if with_loss else (None, {})
            check_gradients(outputs, self._output_gradients)
        ends = outputs if loss is None else (*outputs, loss)
        saved = _GraphEnds(leaves, tuple(map(_edge, ends))) if differentiable else None
        own = None if loss is None else loss.detach()
        return Forward(tuple(map(_detached, outputs)), own, saved, metrics=metrics)

    def backward(self, saved: _GraphEnds, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(saved.edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if pairs:  # there are none in a frozen stage behind frozen ones
            edges, arrived = zip(*pairs, strict=True)
            torch.autograd.backward(edges, arrived)
        return tuple(None if leaf is None else waited(leaf.grad) for leaf in saved.leaves)

    def input_backward(self, saved: _GraphEnds, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return self.backward(saved, gradients)

    def weight_backward(self, saved: _GraphEnds) -> None:
        pass


def _edge(output: Any) -> GradientEdge | None:
    return get_gradient_edge(output) if requires_grad(output) else None


def _detached(output: Any) -> Any:
    return waited(output.detach()) if isinstance(output, Tensor) else output
