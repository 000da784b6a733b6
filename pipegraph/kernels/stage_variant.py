"""A stage traced for one kind of call: these modes, dtypes and frozen parameters, and one shape or all that fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.kernels.blocks.differentiate import TraceOptions, differentiate
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.graphs.block_operation import GradientMask
from pipegraph.kernels.graphs.regions import ModuleRegions
from pipegraph.kernels.interface import Loss
from pipegraph.kernels.loss import check_gradients, compute_loss
from pipegraph.kernels.program import Compiler, Program
from pipegraph.kernels.random_operations import LOSS, numbered
from pipegraph.kernels.sharded import check_outputs, local
from pipegraph.kernels.symbolic_sizes import CallLayout, Dimension, Numbers, SymbolicSizes
from pipegraph.kernels.trace_guard import ModuleState, unchanged, value_signature, with_strides
from pipegraph.recompute import Recompute
from pipegraph.side_effects import effects_noted
from pipegraph.torch_private.fake_tensors import fake_tensors
from pipegraph.torch_private.pytrees import tree_flatten, tree_unflatten
from pipegraph.torch_private.tensors import copy_all
from pipegraph.torch_private.tensors import version_of as version
from pipegraph.torch_private.tracing import GraphSources

# ---- computed copies -------------------------------------------------------------------------------------------------
# Copies of a stage's tensors in fewer bits, with which kernels compute.
#
# .parameters (float32) ─ once per step ─▶ copies (bfloat16) ─▶ F, I, W ─▶ gradients (bfloat16)
#       ▲                                                                        │
#       └── optimizer ◀── .grad (float32) ◀────────── added up ◀─────────────────┘
#
# So modules, optimizers, checkpoints and reductions between ranks see float32 alone.


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

    @property
    def copies(self) -> list[Tensor]:
        """The copies alone."""
        return [copy for copy in self._copies if copy is not None]

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


# ---- stage variant ---------------------------------------------------------------------------------------------------


Results = tuple[int | tuple[Any], ...]
"""Of each output, the position of its tensor among those returned, or the constant that it is."""


@dataclass(frozen=True)
class StageSpec:
    """A stage. Of each input: whether its gradient is always needed; otherwise a call needs it if its tensor requires
    one. Of each output: whether a gradient arrives."""

    module: nn.Module
    input_gradients: tuple[bool, ...]
    output_gradients: tuple[bool, ...]
    loss: Loss | None


@dataclass(frozen=True)
class StageCall:
    """The arguments of one forward.

    Attributes:
        inputs: how many of the leaves are inputs of the stage.
        leaves: the inputs, then the flattened target.
        target_spec: the target's structure; None if it is a tensor.
        with_loss: whether the loss follows.
        differentiable: whether a backward follows.
        gradients: of each input, whether its tensor requires a gradient.
    """

    inputs: int
    leaves: list[Any]
    target_spec: Any
    with_loss: bool
    differentiable: bool
    gradients: tuple[bool, ...] = ()

    @classmethod
    def from_arguments(cls, inputs: Sequence[Any], target: Any, with_loss: bool, differentiable: bool) -> StageCall:
        """Return the call with these inputs; the target counts only with the loss."""
        target = target if with_loss else None
        leaves, spec = ([target], None) if isinstance(target, Tensor) else tree_flatten(target)
        gradients = tuple(differentiable and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in inputs)
        return cls(len(inputs), [*inputs, *leaves], spec, with_loss, differentiable, gradients)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def named(self, names: Sequence[Sequence[Dimension]]) -> list[Sequence[Dimension]]:
        """Return what is known of the dimensions of each tensor, by what is known of each input's."""
        by_leaf = [*names[: self.inputs], *((),) * (len(self.leaves) - len(names))]
        tensors = ((leaf, dims) for leaf, dims in zip(self.leaves, by_leaf, strict=False) if isinstance(leaf, Tensor))
        return [dims if len(dims) == leaf.dim() else (None,) * leaf.dim() for leaf, dims in tensors]

    @property
    def kind(self) -> Any:
        """Equal for calls that differ in sizes and strides alone."""
        leaves = tuple(
            (leaf.dim(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else value_signature(leaf)
            for leaf in self.leaves
        )
        return (self.inputs, leaves, self.target_spec, self.with_loss, self.differentiable, self.gradients)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors)

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """The strides of the tensors."""
        return tuple(tensor.stride() for tensor in self.tensors)


class StageVariant:
    """The graphs of a stage for one kind of call. They are compiled when first asked for.

    The primals are the stage's parameters and buffers, then the tensors of the call, then the keys of its draws if it
    draws random numbers.

    Attributes:
        divided: the graphs.
        results: how the stage's outputs are made of what the forward returns.
        metrics: the names of the metrics, the last things that the forward returns.
        layout: which calls they are for; None if for those of one shape.
        draws: of each draw, its module and how many draws that has made before.
    """

    def __init__(
        self,
        divided: DividedFunction,
        compiler: Compiler,
        results: Results,
        metrics: Sequence[str],
        call: StageCall,
        layout: CallLayout | None,
    ) -> None:
        self.divided = divided
        self.results = results
        self.metrics = tuple(metrics)
        self.layout = layout
        self._compiler = compiler
        self._programs: dict[tuple[str, GradientMask], Program] = {}
        joint, forward = divided.joint, divided.forward
        primals = {node.name: index for index, node in enumerate(joint.primals)}
        outputs = {name: index for index, name in enumerate(forward.outputs)}
        saved = divided.saved(divided.full_mask)
        self._read = [primals[name] for name in forward.inputs]
        self._outputs = [outputs[node.name] for node in joint.outputs]
        self._written = [(index, outputs[node.name]) for index, node in joint.written.items()]
        self._saved_primals = [(name, primals[name]) for name in saved if name in primals]
        self._saved_outputs = [(name, outputs[name]) for name in saved if name not in primals]
        self.draws = [numbered(divided.draws, position) for position in range(len(divided.draws))]
        self._first_input = len(primals) - len(call.tensors) - bool(self.draws)
        positions = iter(range(self._first_input, len(primals)))
        self._inputs = [next(positions) if isinstance(leaf, Tensor) else None for leaf in call.leaves[: call.inputs]]

    def match(self, call: StageCall) -> Numbers | None:
        """Return the sizes of a call of this kind, or None if the graphs are not for it."""
        numbers = () if self.layout is None else self.layout.match(call.tensors)
        return numbers if numbers is not None and self.divided.hold(numbers) else None

    def forward(self, primals: Sequence[Tensor], numbers: Numbers) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run F, which also writes to buffers. Returns the outputs, and what the backward reads by name."""
        read = self._laid_out(primals, numbers)
        outputs = self._program("F", ())(numbers, [read[index] for index in self._read])
        for index, position in self._written:
            primals[index].copy_(outputs[position])
        saved = {name: read[index] for name, index in self._saved_primals}
        saved |= {name: outputs[position] for name, position in self._saved_outputs}
        return [outputs[position] for position in self._outputs], saved

    def backward(
        self,
        kind: str,
        mask: GradientMask,
        numbers: Numbers,
        values: dict[str, Tensor],
        keep: Iterable[str],
        sums: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Run I, W or B on named values, which are emptied. Returns the results and the values to `keep`.

        A result is the tensor that `sums` has for its name, if it was added to that.
        """
        graph = self.divided.graph(kind, mask)
        program = self._program(kind, mask)
        inputs = [values[name] for name in graph.inputs]
        results = {name: values[name] for name in keep if name in values}
        values.clear()
        into = {position: sums[name] for position, name in enumerate(graph.outputs) if name in sums}
        results.update(zip(graph.outputs, program(numbers, inputs, into), strict=True))
        return results

    def prepare(self, kinds: str) -> None:
        """Compile those of F, I, W and B that are in `kinds`, at once, for gradients of all outputs that have one."""
        full = self.divided.full_mask
        backward = self.divided.backward(full)
        exists = {"F": True, "I": backward.input is not None, "W": backward.weight is not None, "B": any(full)}
        self._compile([(kind, () if kind == "F" else full) for kind in kinds if exists[kind]])

    def of_inputs(self, values: dict[str, Tensor], names: Sequence[str | None]) -> tuple[Tensor | None, ...]:
        """Return of each input the value that is named for its primal, or None."""
        of_inputs = [None if position is None else names[position] for position in self._inputs]
        return tuple(None if name is None else values[name] for name in of_inputs)

    def _laid_out(self, primals: Sequence[Tensor], numbers: Numbers) -> Sequence[Tensor]:
        """The primals with the strides that the graphs are for."""
        if self.layout is None:
            return primals
        strides = self.layout.strides_at(numbers)
        end = self._first_input + len(strides)
        inputs = map(with_strides, primals[self._first_input : end], strides)
        return [*primals[: self._first_input], *inputs, *primals[end:]]

    def _program(self, kind: str, mask: GradientMask) -> Program:
        if (kind, mask) not in self._programs:
            self._compile([(kind, mask)])
        return self._programs[kind, mask]

    def _compile(self, requests: list[tuple[str, GradientMask]]) -> None:
        sources = GraphSources()
        self._programs |= zip(requests, self._compiler.programs(self.divided, requests), strict=True)
        sources.release_with(self)


@contextmanager
def _no_effects() -> Iterator[None]:
    """Raise RuntimeError if what runs inside has an effect that a traced graph would have once and for all."""
    with effects_noted() as notes:
        try:
            yield
        finally:
            notes.restore_states()
    for effect, line in notes.calls:
        if effect.is_once:
            raise RuntimeError(f"it {effect.description}, at {line}")


def trace(
    stage: StageSpec,
    guarded_objects: Sequence[Any],
    state: ModuleState,
    call: StageCall,
    compiler: Compiler,
    options: TraceOptions,
    layout: CallLayout | None = None,
    computed: Sequence[Tensor] | None = None,
) -> StageVariant:
    """Trace the stage, and its loss, for calls like this one.

    Args:
        stage: the stage and its loss.
        guarded_objects: the modules of both, and what else tracing must not change.
        state: the modules' tensors.
        call: an example of its calls.
        compiler: makes programs of the graphs.
        options: how the graphs are made.
        layout: of all calls that the graphs are for; None for those of this shape.
        computed: what this rank computes with in the place of the state; None if with its own part of it.

    Raises:
        Exception: whatever the stage raises on fake tensors.
    """
    sources = GraphSources()
    results: list[int | tuple[Any]] = []
    metrics: dict[str, Tensor] = {}
    leaves, inputs = call.leaves, call.inputs

    def function(primals: Sequence[Tensor]) -> list[Tensor]:
        tensors = iter(primals[len(state) :])
        values = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        returned = stage.module(*values[:inputs])
        outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        loss, loss_metrics = None, dict[str, Tensor]()
        if call.with_loss:
            target = tree_unflatten(values[inputs:], call.target_spec) if call.target_spec else values[-1]
            loss, loss_metrics = compute_loss(stage.loss, outputs, target)
        check_outputs(outputs)
        check_gradients(outputs, stage.output_gradients)
        positions = iter(range(len(outputs)))
        results[:] = [next(positions) if isinstance(output, Tensor) else (output,) for output in outputs]
        metrics.clear()
        metrics.update(loss_metrics)
        tensors_returned = [output for output in outputs if isinstance(output, Tensor)]
        return [*tensors_returned, *([] if loss is None else [loss]), *loss_metrics.values()]

    def has_gradient(index: int, output: Tensor) -> bool:
        if call.with_loss:  # then gradients arrive through the loss alone, which follows the outputs
            return index == sum(isinstance(result, int) for result in results)
        return stage.output_gradients[results.index(index)]

    needs_gradient = [tensor.requires_grad for tensor in state.tensors()]
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            needs_gradient.append(position < inputs and (stage.input_gradients[position] or call.gradients[position]))
    sizes = SymbolicSizes() if layout is None else SymbolicSizes(layout.numbers, layout.names)
    if computed is None:
        computed = [local(tensor) for tensor in state.tensors()]
    shapes = [
        *(tensor.shape for tensor in computed),
        *(call.shapes if layout is None else layout.shapes_at(sizes.values)),
    ]
    strides = [tensor.stride() for tensor in computed]
    strides += call.strides if layout is None else layout.strides_at(sizes.values)
    like = [*computed, *call.tensors]
    with (
        unchanged(guarded_objects),
        _no_effects(),
        fake_tensors(sizes.environment),
        torch.set_grad_enabled(call.differentiable),
    ):
        primals = [
            torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).requires_grad_(
                is_wanted and call.differentiable
            )
            for shape, stride, tensor, is_wanted in zip(shapes, strides, like, needs_gradient, strict=True)
        ]
        recompute = options.recompute if isinstance(options.recompute, Recompute) else Recompute()
        regions = ModuleRegions.of_stage(stage.module, recompute)
        divided = differentiate(
            function, state, primals, stage.module, has_gradient, options, sizes, regions, outside=LOSS
        )
    variant = StageVariant(divided, compiler, tuple(results), tuple(metrics), call, layout)
    sources.release_with(variant)
    return variant
