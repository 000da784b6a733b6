"""A stage as it is called one way: in these modes, with these shapes and frozen parameters. Traced once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipegraph.kernels import internals
from pipegraph.kernels.blocks.differentiate import TraceOptions, differentiate
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.compiled.program import Compiler, Program
from pipegraph.kernels.graphs.block_operation import GradientMask
from pipegraph.kernels.interface import Loss
from pipegraph.kernels.loss import check_gradients, scalar_loss
from pipegraph.kernels.modules.attribute_snapshot import unchanged
from pipegraph.kernels.modules.module_state import ModuleState
from pipegraph.kernels.modules.signature import value_signature
from pipegraph.kernels.sharded import check_outputs, local

Results = tuple[int | tuple[Any], ...]
"""Of each output the position of its tensor among those returned, or the constant that it is."""


@dataclass(frozen=True)
class StageSpec:
    """A stage, and of each input and output whether its gradient is wanted, and comes."""

    module: nn.Module
    input_gradients: GradientMask
    output_gradients: GradientMask
    loss: Loss | None


@dataclass(frozen=True)
class StageCall:
    """The arguments of one forward: `inputs` of the `leaves` are the stage's, the others the target's, flattened."""

    inputs: int
    leaves: list[Any]
    target_spec: Any
    with_loss: bool
    differentiable: bool

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def signature(self) -> Any:
        """Calls with the same one run the same graphs."""
        return self._signature(value_signature)

    @property
    def shapes(self) -> Any:
        """The same, but for values in Python."""
        return self._signature(type)

    def _signature(self, of_value: Callable[[Any], Any]) -> Any:
        leaves = [
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else of_value(leaf)
            for leaf in self.leaves
        ]
        return (self.inputs, tuple(leaves), self.target_spec, self.with_loss, self.differentiable)


def leaves_of(inputs: Sequence[Any], target: Any) -> tuple[list[Any], Any]:
    """Inputs and the leaves of the target, and how these are put together."""
    leaves, spec = ([target], None) if isinstance(target, Tensor) else pytree.tree_flatten(target)
    return [*inputs, *leaves], spec


class StageVariant:
    """The derivative of a stage, whose programs are compiled when first asked for.

    Primals are the stage's state, then the tensors among the call's leaves.
    """

    def __init__(self, derivative: DividedFunction, compiler: Compiler, results: Results, call: StageCall) -> None:
        self.divided = derivative
        self.results = results
        self._compiler = compiler
        self._programs: dict[tuple[str, GradientMask], Program] = {}
        joint, forward = derivative.joint, derivative.forward
        primals = {node.name: index for index, node in enumerate(joint.primals)}
        place = {name: index for index, name in enumerate(forward.outputs)}
        saved = derivative.saved(derivative.full_mask)
        self._reads = [primals[name] for name in forward.inputs]
        self._outputs = [place[node.name] for node in joint.outputs]
        self._written = [(index, place[node.name]) for index, node in joint.written.items()]
        self._saved_primals = [(name, primals[name]) for name in saved if name in primals]
        states = len(primals) - len([leaf for leaf in call.leaves if isinstance(leaf, Tensor)])
        positions = iter(range(states, len(primals)))
        self._inputs = [next(positions) if isinstance(leaf, Tensor) else None for leaf in call.leaves[: call.inputs]]
        self._saved_results = [(name, place[name]) for name in saved if name not in primals]

    def forward(self, primals: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """F: the outputs, and what the backward reads. Buffers that the stage writes to get their new values."""
        found = self._program("F", ())([primals[index] for index in self._reads])
        for index, place in self._written:
            primals[index].copy_(found[place])
        saved = {name: primals[index] for name, index in self._saved_primals}
        saved |= {name: found[place] for name, place in self._saved_results}
        return [found[place] for place in self._outputs], saved

    def backward(
        self, kind: str, mask: GradientMask, values: dict[str, Tensor], keep: Iterable[str]
    ) -> dict[str, Tensor]:
        """I, W or B on named values, of which those to `keep` are returned with the results; the others are let go."""
        part = self.divided.graph(kind, mask)
        program = self._program(kind, mask)
        given = [values[name] for name in part.inputs]
        kept = {name: values[name] for name in keep if name in values}
        values.clear()
        kept.update(zip(part.outputs, program(given), strict=True))
        return kept

    def prepare(self, kinds: str) -> None:
        """Compile F, I, W and B, those of `kinds`, at once, for gradients that come from all outputs they can."""
        full = self.divided.full_mask
        backward = self.divided.backward(full)
        there = {"F": True, "I": backward.input is not None, "W": backward.weight is not None, "B": any(full)}
        self._make([(kind, () if kind == "F" else full) for kind in kinds if there[kind]])

    def _program(self, kind: str, mask: GradientMask) -> Program:
        if (kind, mask) not in self._programs:
            self._make([(kind, mask)])
        return self._programs[kind, mask]

    def _make(self, wanted: list[tuple[str, GradientMask]]) -> None:
        self._programs |= zip(wanted, self._compiler.programs(self.divided, wanted), strict=True)

    def of_inputs(self, values: dict[str, Tensor], names: Sequence[str | None]) -> tuple[Tensor | None, ...]:
        """Of each input the value that the name for its primal stands for."""
        found = [None if position is None else names[position] for position in self._inputs]
        return tuple(None if name is None else values[name] for name in found)


def trace(
    stage: StageSpec,
    held: Sequence[Any],
    state: ModuleState,
    call: StageCall,
    compiler: Compiler,
    options: TraceOptions,
) -> StageVariant:
    """Trace the stage, and its loss, for calls like this one. Raises whatever the stage raises on fake tensors.

    `held` are the modules of both, and whatever else tracing must not change; `state` are the modules' tensors.
    """
    results: list[int | tuple[Any]] = []
    leaves, inputs = call.leaves, call.inputs

    def function(primals: Sequence[Tensor]) -> list[Tensor]:
        given = iter(primals[len(state) :])
        values = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        returned = stage.module(*values[:inputs])
        outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        loss = None
        if call.with_loss:
            target = pytree.tree_unflatten(values[inputs:], call.target_spec) if call.target_spec else values[-1]
            loss = scalar_loss(stage.loss, outputs, target)
        check_outputs(outputs)
        check_gradients(outputs, stage.output_gradients)
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        places = iter(range(len(tensors)))
        results[:] = [next(places) if isinstance(output, Tensor) else (output,) for output in outputs]
        return tensors if loss is None else [*tensors, loss]

    def comes(index: int, output: Tensor) -> bool:
        if call.with_loss:  # then gradients come through the loss alone
            return index == len([result for result in results if isinstance(result, int)])
        return stage.output_gradients[results.index(index)]

    wanted = [*(tensor.requires_grad for tensor in state.tensors())]
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            wanted.append(position < inputs and stage.input_gradients[position])
    grad = torch.set_grad_enabled(call.differentiable)
    with unchanged(held), internals.without_log(), internals.fake_tensors(), grad:
        primals = [
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).requires_grad_(
                want and call.differentiable
            )
            for tensor, want in zip([*map(local, state.tensors()), *call.tensors], wanted, strict=True)
        ]
        derivative = differentiate(function, state, primals, stage.module, comes, options)
    return StageVariant(derivative, compiler, tuple(results), call)
