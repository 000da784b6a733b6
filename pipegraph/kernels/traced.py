"""Kernels that are traced: F, I, W and B of a stage as programs over tensors, without autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.autocast import autocast_state, without_autograd_and_autocast
from pipegraph.kernels.autograd import AutogradKernels
from pipegraph.kernels.blocks.differentiate import TraceOptions
from pipegraph.kernels.blocks.divided_function import DividedFunction, reason_of
from pipegraph.kernels.cuda_graphs import MakeRecorder
from pipegraph.kernels.interface import DrawKeys, Dynamic, Forward, Loss, StageKernels
from pipegraph.kernels.loss import check_memory
from pipegraph.kernels.program import Compiler
from pipegraph.kernels.sharded import local
from pipegraph.kernels.stage_run import SavedValues, StageRun
from pipegraph.kernels.stage_variant import ComputedCopies, StageCall, StageSpec, StageVariant, trace
from pipegraph.kernels.symbolic_sizes import CallLayout, Dimension, Numbers, Shapes, call_layout
from pipegraph.kernels.trace_guard import MadeWhenCalled, TraceGuard

# ---- shape variants --------------------------------------------------------------------------------------------------
# The variants of a stage for calls that differ in sizes alone.


Trace = Callable[[StageCall, CallLayout | None], StageVariant]
"""(a call, the layout of all calls like it or None for this shape alone) → a variant"""

STATIC = 1
"""How many shapes have kernels of their own. They are made in less time: most runs have one shape."""
_REFUSED = 2
"""How many shapes are tried before a stage is left to autograd."""


class FittingVariant(NamedTuple):
    """A variant and the sizes of a call that it is for. It is None for a call that is left to autograd.

    Attributes:
        refusal: why, if that has just been found.
    """

    variant: StageVariant | None
    numbers: Numbers = ()
    refusal: str | None = None


class ShapeVariants:
    """A static variant for the first shape, and from the second on symbolic ones, each for all sizes that fit it.

    There is more than one symbolic variant if the stage does different things for different sizes. If it cannot be
    traced with symbols, every shape has a static variant.

    Args:
        dynamic: True for symbolic variants from the first shape on, False for static ones alone.

    Attributes:
        refusal: why the stage cannot be traced with symbols, or None.
        reasons: why shapes are left to autograd, each once.
    """

    def __init__(self, dynamic: Dynamic = "auto") -> None:
        self._dynamic = dynamic
        self.refusal: str | None = None
        self.reasons: dict[str, None] = {}
        self._static: dict[Any, StageVariant | None] = {}
        self._symbolic: list[StageVariant] = []
        self._call_shapes: list[Shapes] = []

    @property
    def every(self) -> list[StageVariant | None]:
        """The variants traced until now; None for a shape that is left to autograd."""
        return [*self._static.values(), *self._symbolic]

    @property
    def is_full(self) -> bool:
        """Whether all variants exist that different sizes alone need: static ones, and one for all other sizes."""
        return len(self.every) > (STATIC if self._dynamic == "auto" else 0)

    @property
    def _is_symbolic(self) -> bool:
        """Whether another shape has a symbolic variant."""
        if isinstance(self._dynamic, bool):
            return self._dynamic and self.refusal is None
        return len(self._static) >= STATIC and self.refusal is None

    @property
    def is_refused(self) -> bool:
        """Whether the first shapes are left to autograd. No other shape is then traced."""
        return len(self._static) >= _REFUSED and not any(self.every)

    def find(self, call: StageCall) -> FittingVariant | None:
        """Return the variant for a call, if there is one."""
        key = call.shapes, call.strides
        if key in self._static:
            return FittingVariant(self._static[key])
        for variant in self._symbolic:
            if (numbers := variant.match(call)) is not None:
                return FittingVariant(variant, numbers)
        return FittingVariant(None) if self.is_refused else None

    def add(self, call: StageCall, names: Sequence[Sequence[Dimension]], trace: Trace) -> FittingVariant:
        """Trace a variant for a call.

        Args:
            call: no variant is for it yet.
            names: what is known of the dimensions of each input.
            trace: raises PipegraphError for a stage or loss that is refused, MadeWhenCalled for one that cannot be
                traced yet, and anything for what cannot be traced.
        """
        self._call_shapes.append(call.shapes)
        if self._is_symbolic:
            try:
                return self._add_symbolic(call, names, trace)
            except (PipegraphError, MadeWhenCalled):
                raise
            except Exception as error:  # many operations take numbers alone
                self.refusal = reason_of(error)
        key = call.shapes, call.strides
        try:
            self._static[key] = trace(call, None)
        except (PipegraphError, MadeWhenCalled):
            raise
        except Exception as error:  # whatever an operation raises on a fake tensor
            self._static[key] = None
            self.reasons[reason_of(error)] = None
            return FittingVariant(None, refusal=reason_of(error))
        return FittingVariant(self._static[key])

    def _add_symbolic(self, call: StageCall, names: Sequence[Sequence[Dimension]], trace: Trace) -> FittingVariant:
        """Trace a variant for all sizes. Only if it does not take sizes of 1, as in this call, trace one for those."""
        dimension_names = call.named(names)
        general = call_layout(call.tensors, self._call_shapes, dimension_names)
        if general.match(call.tensors) != general.numbers and general.shapes not in map(_shapes, self._symbolic):
            self._symbolic.append(trace(call, general))
            if (numbers := self._symbolic[-1].match(call)) is not None:
                return FittingVariant(self._symbolic[-1], numbers)
        layout = call_layout(call.tensors, self._call_shapes, dimension_names, ones_as_sizes=False)
        if layout in (variant.layout for variant in self._symbolic):  # of this very call: another one would be equal
            raise RuntimeError("kernels that are compiled for a size do not take it")
        variant = trace(call, layout)
        if not variant.divided.hold(layout.numbers):
            raise RuntimeError("kernels that are traced for a size do not take it")
        self._symbolic.append(variant)
        return FittingVariant(variant, layout.numbers)

    def refused(self) -> ShapeVariants | None:
        """Return the shapes that are left to autograd, with the reasons; None without such shapes."""
        refused = ShapeVariants(self._dynamic)
        refused._static = {key: None for key, variant in self._static.items() if variant is None}
        refused.reasons = self.reasons
        return refused if refused._static else None


def _shapes(variant: StageVariant) -> Any:
    return None if variant.layout is None else variant.layout.shapes


# ---- traced ----------------------------------------------------------------------------------------------------------


class TracedKernels:
    """F, I, W and B as pure functions of the stage's tensors.

    A stage is traced at its first call, and again if its mode, `requires_grad`, a dtype, autocast, or the identity of
    its modules, parameters or buffers changes; a stage includes the loss after it. It is also traced for the first
    shape of its inputs, and then once for all others, with symbols for sizes; with ``dynamic=True`` for all sizes at
    once, with ``dynamic=False`` for each shape. After `retrace` everything is traced again. Code that cannot be traced,
    and a variant beyond `max_variants`, is left to autograd with a warning; with `strict`, PipegraphError is raised.
    With `recorder`, traced kernels are recorded as CUDA graphs.
    """

    def __init__(
        self,
        stage: nn.Module,
        input_gradients: Sequence[bool],
        output_gradients: Sequence[bool],
        loss: Loss | None,
        compiler: Compiler,
        options: TraceOptions,
        max_variants: int,
        strict: bool = False,
        recorder: MakeRecorder | None = None,
        dynamic: Dynamic = "auto",
    ) -> None:
        self._stage = StageSpec(stage, tuple(input_gradients), tuple(output_gradients), loss)
        self._compiler = compiler
        self._options = options
        self._max_variants = max_variants
        self._strict = strict
        self._dynamic = dynamic
        self._autograd = AutogradKernels(stage, input_gradients, output_gradients, loss)
        self._guard: TraceGuard | None = None  # made at the first call: until then the stage may change
        self._names: list[Sequence[Dimension]] = []
        self._variants: dict[Any, ShapeVariants] = {}
        self._forgotten: list[StageVariant | None] = []  # keeps their compiled graphs for equal ones
        self._variant_count = 0  # without those that sizes alone give reason for
        self._refusal: str | None = None  # why the stage is left to autograd, before the user is warned
        self._warned: set[str] = set()
        self._awaited: str | None = None  # what a call without a graph has to make before there can be one
        self._completed: set[str] = set()
        self._keys: DrawKeys | None = None
        self._copies: ComputedCopies | None = None
        self._kernels = StageRun(self.name, recorder)

    @property
    def variants(self) -> list[StageVariant | None]:
        """The variants traced until now; None for each that is left to autograd."""
        return [variant for variants in self._variants.values() for variant in variants.every]

    @property
    def by_kind(self) -> list[ShapeVariants]:
        """The variants in groups: those of one group differ in sizes only."""
        return list(self._variants.values())

    @property
    def copies(self) -> list[Tensor]:
        """The copies in another dtype that the stage computes with; some are of what is left to autograd."""
        return [*([] if self._copies is None else self._copies.copies), *self._autograd.copies]

    @property
    def name(self) -> str:
        """The class of the stage."""
        return type(self._stage.module).__name__

    def name_dimensions(self, shapes: Sequence[Sequence[int | str]]) -> None:
        self._names = [*shapes]

    def draw_from(self, keys: DrawKeys) -> None:
        self._keys = keys
        self._options = replace(self._options, is_seeded=True)
        self._autograd.draw_from(keys)

    def compute_in(self, dtype: torch.dtype, uncast_names: Collection[str]) -> None:
        self._copies = ComputedCopies(self._stage.module, dtype, uncast_names)
        self._autograd.compute_in(dtype, uncast_names)

    def begin(self) -> None:
        if self._guard is None:
            self._guard = TraceGuard(self._stage.module, self._stage.loss)
        elif (changed := self._guard.look()) is not None:
            # A forward that replaces a buffer at each call cannot be traced; it is not tried again at each step.
            self._forget(keep_refused=changed == "tensors")
        if self._copies is not None:
            self._copies.renew(self._state)
        self._kernels.begin(self._computed)
        self._autograd.begin()

    def retrace(self) -> None:
        self._forget()
        self._options.blocks.clear()
        self._guard = None
        self._variant_count = 0
        self._warned.clear()
        self._completed.clear()

    def prepare(self, inputs: Sequence[Any], *, target: Any, with_loss: bool, differentiable: bool, kinds: str) -> None:
        call = StageCall.from_arguments(inputs, target, with_loss, differentiable)
        try:
            while (variant := self._variant(call).variant) is not None:
                variant.prepare(kinds)
                if variant.match(call) is not None:  # else compiling has added a condition that this call does not meet
                    return
        except PipegraphError:  # which `forward` raises again
            return

    def forward(
        self, inputs: Sequence[Any], *, target: Any = None, with_loss: bool = False, differentiable: bool = True
    ) -> Forward:
        call = StageCall.from_arguments(inputs, target, with_loss, differentiable)
        variant, numbers, _ = self._variant(call)
        if variant is None:
            result = self._autograd.forward(inputs, target=target, with_loss=with_loss, differentiable=differentiable)
            check_memory((*result.outputs, result.loss, *result.metrics.values()))
            self._completed |= {self._awaited} if self._awaited is not None else set()
            self._warn()  # after it: an error of the model's own has nothing to do with tracing
            return result
        with without_autograd_and_autocast():
            call_tensors = [*call.tensors, *self._keys_of(variant)]
            tensors, values, graphs = self._kernels.forward(variant, numbers, self._computed, call_tensors)
            if self._copies is not None:
                self._copies.write_back(variant.divided.joint.written)
        tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
        outputs = tuple(tensors[result] if isinstance(result, int) else result[0] for result in variant.results)
        saved = SavedValues(variant, numbers, values, graphs) if differentiable else None
        first = len(tensors) - len(variant.metrics)
        metrics = dict(zip(variant.metrics, tensors[first:], strict=True))
        return Forward(outputs, tensors[first - 1] if with_loss else None, saved, is_pure=True, metrics=metrics)

    def backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        if not isinstance(saved, SavedValues):
            return self._autograd.backward(saved, gradients)
        saved.add_gradients(gradients)
        return self._kernels.backward(saved, "B", self._state)

    def input_backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        if not isinstance(saved, SavedValues):
            return self._autograd.input_backward(saved, gradients)
        saved.add_gradients(gradients)
        if saved.variant.divided.backward(saved.mask).input is None:
            return (None,) * len(self._stage.input_gradients)
        return self._kernels.backward(saved, "I", self._state)

    def weight_backward(self, saved: Any) -> None:
        if not isinstance(saved, SavedValues):
            self._autograd.weight_backward(saved)
        elif saved.variant.divided.backward(saved.mask).weight is not None:
            self._kernels.backward(saved, "W", self._state)

    @property
    def _state(self) -> list[Tensor]:
        assert self._guard is not None
        return self._guard.state.tensors()

    @property
    def _computed(self) -> list[Tensor]:
        """What this rank computes with in the place of the state."""
        return [local(tensor) for tensor in self._state] if self._copies is None else self._copies.tensors()

    def _keys_of(self, variant: StageVariant) -> list[Tensor]:
        """The keys of the draws of this forward [draws], if there are any."""
        if not variant.draws:
            return []
        assert self._keys is not None
        keys = [self._keys.key(module, number) for module, number in variant.draws]
        device = variant.divided.joint.primals[-1].meta["val"].device
        # From pinned memory, a copy to a GPU holds up neither this thread nor what the GPU was given before.
        return [torch.tensor(keys, pin_memory=device.type != "cpu").to(device, non_blocking=True)]

    def _variant(self, call: StageCall) -> FittingVariant:
        if self._guard is None:
            self.begin()
        assert self._guard is not None
        key = self._guard.key, call.kind, autocast_state(), torch.is_anomaly_enabled()
        variants = self._variants.get(key)
        fit = None if variants is None else variants.find(call)
        return self._new_variant(key, call, self._guard) if fit is None else fit

    def _new_variant(self, key: Any, call: StageCall, guard: TraceGuard) -> FittingVariant:
        """Trace a variant for a call, unless there are too many. All shapes of inputs after the first are one."""
        variants = self._variants.get(key)
        is_counted = variants is None or variants.is_full
        if is_counted and self._variant_count == self._max_variants:
            self._refusal = self._too_many(None if variants is None else variants.refusal)
            return FittingVariant(None)
        self._variant_count += is_counted
        try:
            variants = self._variants.setdefault(key, ShapeVariants(self._dynamic))
            fit = variants.add(call, self._names, partial(self._trace, guard))
        except MadeWhenCalled:  # autograd takes this call, which makes what is missing
            self._variant_count -= is_counted
            return FittingVariant(None)
        if fit.refusal is not None:
            self._refusal = (
                f"{self.name} cannot be traced and is left to autograd, where a zero-bubble "
                f"schedule gains nothing: {fit.refusal}"
            )
        return fit

    def _trace(self, guard: TraceGuard, call: StageCall, layout: CallLayout | None) -> StageVariant:
        if guard.obstacle is not None:
            raise RuntimeError(guard.obstacle)
        if torch.is_anomaly_enabled():
            raise RuntimeError("torch.autograd.set_detect_anomaly is on, and only autograd detects anomalies")
        try:
            state, compiler, options = guard.state, self._compiler, self._options
            with torch.inference_mode(False):  # an evaluation in it computes the same
                return trace(self._stage, guard.objects, state, call, compiler, options, layout, self._computed)
        except MadeWhenCalled as error:
            if str(error) in self._completed:  # and a real call has not made it
                raise RuntimeError(str(error)) from error
            self._awaited = str(error)
            raise

    def _too_many(self, refusal: str | None) -> str:
        symbols = f" Sizes cannot be symbols ({refusal}), so each shape is a variant." if refusal is not None else ""
        return (
            f"{self.name} and its loss have been traced for {self._max_variants} variants, "
            f"each with its own modes, dtypes, branches on sizes, or values in Python; another one is left to "
            f"autograd.{symbols} Try: give what changes as a tensor, or raise Pipeline(max_variants=…)"
        )

    def _forget(self, keep_refused: bool = False) -> None:
        self._kernels.forget()
        self._forgotten = self.variants
        refused = {key: variants.refused() for key, variants in self._variants.items()} if keep_refused else {}
        self._variants = {key: variants for key, variants in refused.items() if variants is not None}

    def _warn(self) -> None:
        """Warn, once, that autograd has taken over, or raise PipegraphError."""
        if self._refusal is not None and self._strict:
            raise PipegraphError(f"{self._refusal}.", "without strict, or change what cannot be traced.")
        if self._refusal is not None and self._refusal not in self._warned:
            self._warned.add(self._refusal)
            warnings.warn(self._refusal, stacklevel=3)
        self._refusal = None


# ---- kernel report ---------------------------------------------------------------------------------------------------
# How often stages and blocks have been traced and compiled, and for which sizes.


@dataclass(frozen=True)
class KernelCount:
    """The kernels of a stage's own code, or of a block. Other modes and dtypes of the same code are counted separately.

    Attributes:
        name: the class of the module.
        stages: the stages in which it runs.
        static: the number of shapes that have their own kernels.
        symbolic: the number of kernels for dynamic sizes: 1, and one more for each branch on sizes.
        autograd: the number of shapes that are left to autograd.
        conditions: for each symbolic kernel, the conditions on its sizes.
        reasons: why shapes are left to autograd.
        inlined: the repeated modules that are compiled again at each call in the code, and why.
    """

    name: str
    stages: tuple[int, ...]
    static: int
    symbolic: int
    autograd: int
    conditions: tuple[tuple[str, ...], ...]
    reasons: tuple[str, ...] = ()
    inlined: tuple[str, ...] = ()

    @property
    def compilations(self) -> int:
        """How often the code was compiled."""
        return self.static + self.symbolic

    def __str__(self) -> str:
        where = f"{self.name} (stage {', '.join(map(str, self.stages))})"
        parts = [f"{self.static} static", f"{self.symbolic} symbolic"]
        parts += [f"{self.autograd} left to autograd"] if self.autograd else []
        conditions = [" and ".join(terms) for terms in self.conditions if terms]
        parts[-1] += f" ({'; '.join(self.reasons)})" if self.reasons else ""
        parts += self.inlined
        return f"{where}: {', '.join(parts)}{''.join(f'; for {condition}' for condition in conditions)}"


def kernels_report(kernels: Mapping[int, StageKernels]) -> list[KernelCount]:
    """Return the counts of all stages that are traced, and then of their blocks, each once."""
    counts: list[KernelCount] = []
    blocks: dict[Any, dict[DividedFunction, None]] = {}
    stages: dict[Any, dict[int, None]] = {}
    for stage, stage_kernels in kernels.items():
        if not isinstance(stage_kernels, TracedKernels):
            continue
        for variants in stage_kernels.by_kind:
            functions = [variant.divided for variant in variants.every if variant is not None]
            autograd_count = len(variants.every) - len(functions)
            counts.append(_count(stage_kernels.name, (stage,), functions, autograd_count, tuple(variants.reasons)))
            for block in (block for function in functions for block in _blocks(function)):
                blocks.setdefault(block.family, {})[block] = None
                stages.setdefault(block.family, {})[stage] = None
    return counts + [
        _count(next(iter(members)).name, tuple(stages[family]), list(members), 0) for family, members in blocks.items()
    ]


def _count(
    name: str, stages: tuple[int, ...], functions: list[DividedFunction], autograd: int, reasons: tuple[str, ...] = ()
) -> KernelCount:
    symbolic = [function for function in functions if function.sizes]
    inlined = {name: why for function in functions for name, why in function.inlined.items()}
    return KernelCount(
        name,
        stages,
        len(functions) - len(symbolic),
        len(symbolic),
        autograd,
        tuple(tuple(function.sizes.described()) for function in symbolic),
        reasons,
        tuple(f"{name} in it compiled at each call ({why})" for name, why in inlined.items()),
    )


def _blocks(function: DividedFunction) -> Iterator[DividedFunction]:
    for block in function.blocks:
        yield block
        yield from _blocks(block)
