"""Kernels that are traced: F, I, W and B of a stage as programs over tensors, without autograd."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.autograd import AutogradKernels
from pipegraph.kernels.blocks.differentiate import TraceOptions
from pipegraph.kernels.blocks.repeated_modules import DEVICES, autocast_state
from pipegraph.kernels.compiled.program import Compiler
from pipegraph.kernels.gradients import accumulate, with_strides
from pipegraph.kernels.graphs.block_operation import GradientMask
from pipegraph.kernels.interface import Forward, Loss
from pipegraph.kernels.modules.trace_guard import TraceGuard
from pipegraph.kernels.sharded import local
from pipegraph.kernels.stage_variant import StageCall, StageSpec, StageVariant, leaves_of, trace

MOST = 8
"""So often a stage is traced for values in Python that change (an attribute, a number among the targets)."""


class SavedValues:
    """What the backward of one microbatch reads, by name; after I, what W does."""

    __slots__ = ("mask", "values", "variant")

    def __init__(self, variant: StageVariant, values: dict[str, Tensor]) -> None:
        self.variant, self.values = variant, values
        self.mask: GradientMask = ()


def held_tensors(saved: Any) -> Collection[Tensor] | None:
    """What a `Forward.saved` keeps in memory at the moment; None where autograd keeps it, which does not say."""
    return saved.values.values() if isinstance(saved, SavedValues) else None


class TracedKernels:
    """F, I, W and B as pure functions of the stage's tensors.

    They are traced when first called, and again for each new way in which stage and loss stand at the beginning of a
    step, shape and region of autocast; what was traced before is kept. What cannot be traced is left to autograd.
    """

    def __init__(
        self,
        stage: nn.Module,
        input_gradients: Sequence[bool],
        output_gradients: Sequence[bool],
        loss: Loss | None,
        compiler: Compiler,
        options: TraceOptions,
    ) -> None:
        self._stage = StageSpec(stage, tuple(input_gradients), tuple(output_gradients), loss)
        self._compiler = compiler
        self._options = options
        self._autograd = AutogradKernels(stage, input_gradients, output_gradients, loss)
        self._standing: TraceGuard | None = None  # looked at when first called: until then the stage may be changed
        self._variants: dict[Any, dict[Any, StageVariant | None]] = {}  # by how the stage stood, by calls
        self._current: dict[Any, StageVariant | None] = {}
        self._alike: Counter[Any] = Counter()  # variants that differ in Python's values alone
        self._untold: str | None = None  # why the stage is left to autograd
        self._told: set[str] = set()

    @property
    def variants(self) -> list[StageVariant | None]:
        """What was traced until now; None for what is left to autograd."""
        return [variant for known in self._variants.values() for variant in known.values()]

    def begin(self) -> None:
        if self._standing is None:
            self._standing = TraceGuard(self._stage.module, self._stage.loss)
        else:
            self._standing.look()
        self._current = self._variants.get((self._standing.tensors, self._standing.values), {})

    def prepare(self, inputs: Sequence[Any], *, target: Any, with_loss: bool, differentiable: bool, kinds: str) -> None:
        call = StageCall(len(inputs), *leaves_of(inputs, target if with_loss else None), with_loss, differentiable)
        try:
            variant = self._variant(call)
        except PipegraphError:
            return
        if variant is not None:
            variant.prepare(kinds)

    def forward(
        self, inputs: Sequence[Any], *, target: Any = None, with_loss: bool = False, differentiable: bool = True
    ) -> Forward:
        call = StageCall(len(inputs), *leaves_of(inputs, target if with_loss else None), with_loss, differentiable)
        variant = self._variant(call)
        if variant is None:
            made = self._autograd.forward(inputs, target=target, with_loss=with_loss, differentiable=differentiable)
            self._tell()
            return made
        with _plainly():
            found, saved = variant.forward([*map(local, self._state), *call.tensors])
        found = [each.detach() if each.requires_grad else each for each in found]
        outputs = tuple(found[result] if isinstance(result, int) else result[0] for result in variant.results)
        return Forward(
            outputs, found[-1] if with_loss else None, SavedValues(variant, saved) if differentiable else None
        )

    def backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        if not isinstance(saved, SavedValues):
            return self._autograd.backward(saved, gradients)
        self._take(saved, gradients)
        return self._run(saved, "B")

    def input_backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        if not isinstance(saved, SavedValues):
            return self._autograd.input_backward(saved, gradients)
        self._take(saved, gradients)
        if saved.variant.divided.backward(saved.mask).input is None:
            return (None,) * len(self._stage.input_gradients)
        return self._run(saved, "I")

    def weight_backward(self, saved: Any) -> None:
        if not isinstance(saved, SavedValues):
            self._autograd.weight_backward(saved)
        elif saved.variant.divided.backward(saved.mask).weight is not None:
            self._run(saved, "W")

    @property
    def _state(self) -> list[Tensor]:
        assert self._standing is not None
        return self._standing.state.tensors()

    def _take(self, saved: SavedValues, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of outputs to what was saved."""
        variant = saved.variant
        given = [gradients[index] for index, result in enumerate(variant.results) if isinstance(result, int)]
        given += gradients[len(variant.results) :]
        tangents = variant.divided.joint.tangents
        given += [None] * (len(tangents) - len(given))
        saved.mask = tuple(
            node is not None and gradient is not None for node, gradient in zip(tangents, given, strict=True)
        )
        for node, gradient in zip(tangents, given, strict=True):
            if node is not None and gradient is not None:
                saved.values[node.name] = with_strides(gradient, node.meta["val"])

    def _run(self, saved: SavedValues, kind: str) -> tuple[Tensor | None, ...]:
        """Run I, W or B, accumulate the gradients of parameters that it gives, and return those of inputs."""
        derivative = saved.variant.divided
        parts = derivative.backward(saved.mask)
        later = parts.weight.inputs if kind == "I" and parts.weight is not None else ()
        with _plainly():
            values = saved.variant.backward(kind, saved.mask, saved.values, later)
            given = set(derivative.graph(kind, saved.mask).outputs)
            names = [name if name in given else None for name in parts.gradients]
            state = self._state
            inputs = saved.variant.of_inputs(values, names)
            accumulate(
                ((state[index], values[name]) for index, name in enumerate(names[: len(state)]) if name is not None),
                shared=inputs,
            )
        saved.values = {name: values[name] for name in later}
        return inputs

    def _variant(self, call: StageCall) -> StageVariant | None:
        if self._standing is None:
            self.begin()
        key = call.signature, autocast_state()
        if key not in self._current:
            return self._traced(call, key)
        return self._current[key]

    def _traced(self, call: StageCall, key: Any) -> StageVariant | None:
        standing = self._standing
        assert standing is not None
        like = standing.tensors, call.shapes, autocast_state()
        if self._alike[like] == MOST:
            self._untold = (
                f"{type(self._stage.module).__name__} or its loss is called with ever other values in Python, for each "
                f"of which it would be compiled again: it is left to autograd from now on. Try: give what changes as a "
                f"tensor"
            )
            return None
        self._alike[like] += 1
        try:
            if standing.obstacle is not None:
                raise RuntimeError(standing.obstacle)
            made = trace(self._stage, standing.held, standing.state, call, self._compiler, self._options)
        except PipegraphError:
            raise
        except Exception as error:
            made = None
            self._untold = (
                f"{type(self._stage.module).__name__} cannot be traced and is left to autograd, where a zero-bubble "
                f"schedule gains nothing: {_reason(error)}"
            )
        self._current[key] = made
        self._variants[standing.tensors, standing.values] = self._current
        return made

    def _tell(self) -> None:
        """Say why autograd has taken over, once: what fails there as well is no matter of tracing."""
        if self._untold is not None and self._untold not in self._told:
            self._told.add(self._untold)
            warnings.warn(self._untold, stacklevel=3)
        self._untold = None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no reason given'}"


@contextmanager
def _plainly() -> Iterator[None]:
    """Run operations as they stand in a graph: autograd and autocast were traced into it."""
    with torch.no_grad():
        enabled = [device for device, (is_enabled, _) in zip(DEVICES, autocast_state(), strict=True) if is_enabled]
        if not enabled:
            yield
            return
        with ExitStack() as stack:
            for device in enabled:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
