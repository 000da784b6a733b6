"""Kernels that call the stage's module and let autograd differentiate it: for stages that cannot be traced."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipegraph.kernels.interface import DrawKeys, Forward, Loss, StageKernels
from pipegraph.kernels.loss import check_gradients, compute_loss, explained_without_target, requires_grad
from pipegraph.kernels.random_operations import LOSS, RandomOps, numbered, refusing_draws
from pipegraph.kernels.sharded import check_outputs, waited
from pipegraph.kernels.stage_variant import ComputedCopies, written
from pipegraph.kernels.trace_guard import ModuleState, accumulate


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
        self._keys: DrawKeys | None = None
        self._copies: ComputedCopies | None = None
        self._state: ModuleState | None = None  # of this step, once its copies are renewed

    @property
    def copies(self) -> list[Tensor]:
        """The copies in another dtype that the stage computes with."""
        return [] if self._copies is None else self._copies.copies

    def draw_from(self, keys: DrawKeys) -> None:
        self._keys = keys

    def compute_in(self, dtype: torch.dtype, uncast_names: Collection[str]) -> None:
        self._copies = ComputedCopies(self._stage, dtype, uncast_names)

    def begin(self) -> None:
        self._state = None

    def forward(
        self, inputs: Sequence[Any], *, target: Any = None, with_loss: bool = False, differentiable: bool = True
    ) -> Forward:
        # Each input becomes a leaf: the graph of this microbatch ends here.
        leaves = tuple(
            value.detach().requires_grad_()
            if differentiable and (needs_grad or (isinstance(value, Tensor) and value.requires_grad))
            else None
            for value, needs_grad in zip(inputs, self._input_gradients, strict=True)
        )
        with self._drawing(), torch.set_grad_enabled(differentiable):
            with self._computing():
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
        detached_loss = None if loss is None else loss.detach()
        return Forward(tuple(map(_detached, outputs)), detached_loss, saved, metrics=metrics)

    def backward(self, saved: _GraphEnds, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(saved.edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if pairs:  # a frozen stage after frozen stages has no pairs
            edges, arrived = zip(*pairs, strict=True)
            with self._in_place(), nullcontext() if self._keys is None else refusing_draws():
                torch.autograd.backward(edges, arrived)
            self._accumulate()
        return tuple(None if leaf is None else waited(leaf.grad) for leaf in saved.leaves)

    def input_backward(self, saved: _GraphEnds, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return self.backward(saved, gradients)

    def weight_backward(self, saved: _GraphEnds) -> None:
        pass

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """A context in which the stage computes with the copies of its tensors, if it has some."""
        if self._copies is None:
            yield
            return
        if self._state is None:
            self._state = ModuleState(self._stage.modules())
            self._copies.renew(self._state.tensors())
        previous_versions = self._copies.versions()
        with self._in_place():
            yield
        with torch.no_grad():
            self._copies.write_back(written(previous_versions, self._copies.versions()))

    def _in_place(self) -> AbstractContextManager[None]:
        """A context in which the stage's modules hold the copies: a backward may run a part of the forward again."""
        if self._copies is None or self._state is None:
            return nullcontext()
        return self._state.replaced(self._copies.tensors())

    def _accumulate(self) -> None:
        """Add the gradients of copies to those of the stage's parameters."""
        if self._copies is None or self._state is None:
            return
        pairs = list(zip(self._state.tensors(), self._copies.tensors(), strict=True))
        with torch.no_grad():
            accumulate((tensor, copy.grad) for tensor, copy in pairs if copy is not tensor and copy.grad is not None)
        for original, copy in pairs:
            if copy is not original:
                copy.grad = None

    def _drawing(self) -> AbstractContextManager[None]:
        keys = self._keys
        if keys is None:
            return nullcontext()
        draws = RandomOps(self._stage, LOSS, key=lambda position: keys.key(*numbered(draws.modules, position)))
        return draws.replacing()


def _edge(output: Any) -> GradientEdge | None:
    return get_gradient_edge(output) if requires_grad(output) else None


def _detached(output: Any) -> Any:
    return waited(output.detach()) if isinstance(output, Tensor) else output
