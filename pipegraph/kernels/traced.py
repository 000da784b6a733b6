"""Kernels that are traced: F, I, W and B of a stage as programs over tensors, without autograd."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.accumulate import accumulate
from pipegraph.kernels.autograd import AutogradKernels
from pipegraph.kernels.blocks import DEVICES, autocast_state
from pipegraph.kernels.derivative import Present
from pipegraph.kernels.differentiate import Options
from pipegraph.kernels.interface import Forward, Loss
from pipegraph.kernels.joint import with_strides
from pipegraph.kernels.program import Compiler
from pipegraph.kernels.sharded import check_traceable, is_sharded, layout, local
from pipegraph.kernels.state import State
from pipegraph.kernels.variant import Call, Stage, Variant, leaves_of, trace


class _Saved:
    """What the backward of one microbatch reads, by name; after I, what W does."""

    __slots__ = ("present", "values", "variant")

    def __init__(self, variant: Variant, values: dict[str, Tensor]) -> None:
        self.variant, self.values = variant, values
        self.present: Present = ()


class TracedKernels:
    """F, I, W and B as pure functions of the stage's tensors.

    They are traced when first called, and again for each new mode of a module, set of frozen parameters, shape and
    region of autocast; what was traced before is kept. A stage that cannot be traced is left to autograd.
    """

    def __init__(
        self,
        stage: nn.Module,
        input_gradients: Sequence[bool],
        output_gradients: Sequence[bool],
        loss: Loss | None,
        compiler: Compiler,
        options: Options,
    ) -> None:
        self._stage = Stage(stage, tuple(input_gradients), tuple(output_gradients), loss)
        self._compiler = compiler
        self._options = options
        self._autograd = AutogradKernels(stage, input_gradients, output_gradients, loss)
        self._state: State | None = None  # looked for when first called: until then the stage may be changed
        self._modules: list[nn.Module] = []
        self._variants: dict[Any, Variant | None] = {}
        self._reasons: set[str] = set()  # why the stage was left to autograd, each said once

    def prepare(self, inputs: Sequence[Any], *, target: Any, with_loss: bool, differentiable: bool, kinds: str) -> None:
        call = Call(len(inputs), *leaves_of(inputs, target if with_loss else None), with_loss, differentiable)
        try:
            variant = self._variant(call, self._tensors())
        except PipegraphError:
            return
        if variant is not None:
            variant.prepare(kinds)

    def forward(
        self, inputs: Sequence[Any], *, target: Any = None, with_loss: bool = False, differentiable: bool = True
    ) -> Forward:
        state = self._tensors()
        call = Call(len(inputs), *leaves_of(inputs, target if with_loss else None), with_loss, differentiable)
        variant = self._variant(call, state)
        if variant is None:
            return self._autograd.forward(inputs, target=target, with_loss=with_loss, differentiable=differentiable)
        with _plainly():
            found, saved = variant.forward([*map(local, state), *call.tensors])
        found = [each.detach() if each.requires_grad else each for each in found]
        outputs = tuple(found[result] if isinstance(result, int) else result[0] for result in variant.results)
        return Forward(outputs, found[-1] if with_loss else None, _Saved(variant, saved) if differentiable else None)

    def backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        if not isinstance(saved, _Saved):
            return self._autograd.backward(saved, gradients)
        self._take(saved, gradients)
        return self._run(saved, "B")

    def input_backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        if not isinstance(saved, _Saved):
            return self._autograd.input_backward(saved, gradients)
        self._take(saved, gradients)
        if saved.variant.derivative.backward(saved.present).input is None:
            return (None,) * len(self._stage.input_gradients)
        return self._run(saved, "I")

    def weight_backward(self, saved: Any) -> None:
        if not isinstance(saved, _Saved):
            self._autograd.weight_backward(saved)
        elif saved.variant.derivative.backward(saved.present).weight is not None:
            self._run(saved, "W")

    def _tensors(self) -> list[Tensor]:
        """The stage's parameters and buffers."""
        if self._state is None:
            self._state, self._modules = State(self._stage.module), list(self._stage.module.modules())
        return self._state.tensors()

    def _take(self, saved: _Saved, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of outputs to what was saved."""
        variant = saved.variant
        given = [gradients[index] for index, result in enumerate(variant.results) if isinstance(result, int)]
        given += gradients[len(variant.results) :]
        tangents = variant.derivative.joint.tangents
        given += [None] * (len(tangents) - len(given))
        saved.present = tuple(
            node is not None and gradient is not None for node, gradient in zip(tangents, given, strict=True)
        )
        for node, gradient in zip(tangents, given, strict=True):
            if node is not None and gradient is not None:
                saved.values[node.name] = with_strides(gradient, node.meta["val"])

    def _run(self, saved: _Saved, kind: str) -> tuple[Tensor | None, ...]:
        """Run I, W or B, accumulate the gradients of parameters that it gives, and return those of inputs."""
        derivative = saved.variant.derivative
        parts = derivative.backward(saved.present)
        later = parts.weight.inputs if kind == "I" and parts.weight is not None else ()
        with _plainly():
            values = saved.variant.backward(kind, saved.present, saved.values, later)
            given = set(derivative.part(kind, saved.present).outputs)
            names = [name if name in given else None for name in parts.gradients]
            state = self._tensors()
            inputs = saved.variant.of_inputs(values, names)
            accumulate(
                ((state[index], values[name]) for index, name in enumerate(names[: len(state)]) if name is not None),
                shared=inputs,
            )
        saved.values = {name: values[name] for name in later}
        return inputs

    def _variant(self, call: Call, state: Sequence[Tensor]) -> Variant | None:
        key = (
            call.signature,
            tuple([module.training for module in self._modules]),
            tuple([tensor.requires_grad for tensor in state]),
            tuple([layout(tensor) for tensor in state if is_sharded(tensor)]),
            autocast_state(),
        )
        if key not in self._variants:
            self._variants[key] = self._traced(call, state)
        return self._variants[key]

    def _traced(self, call: Call, state: Sequence[Tensor]) -> Variant | None:
        assert self._state is not None
        try:
            check_traceable(self._modules, state)
            _check_plain(state)
            return trace(self._stage, self._state, call, self._compiler, self._options)
        except PipegraphError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no reason given'}"
            if reason not in self._reasons:
                self._reasons.add(reason)
                warnings.warn(
                    f"{type(self._stage.module).__name__} cannot be traced and is left to autograd, where a "
                    f"zero-bubble schedule gains nothing: {reason}",
                    stacklevel=4,
                )
            return None


def _check_plain(state: Sequence[Tensor]) -> None:
    """Hooks of parameters are called by autograd alone, and a graph holds tensors that have no class of their own."""
    for tensor in state:
        if type(local(tensor)) not in (Tensor, nn.Parameter, nn.Buffer):
            raise RuntimeError(f"a parameter or buffer is a {type(tensor).__name__}")
        # There is no public way to ask for hooks.
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise RuntimeError(f"a parameter of shape {list(tensor.shape)} has a hook")


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
