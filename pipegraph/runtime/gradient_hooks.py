"""Hooks of parameters that the model has: called once for the gradient of a step, as a backward of the batch would.

A hook that clips gives other numbers for the gradient of each microbatch. So the hooks that a stage registers are taken
off its parameters, and called when the gradients of a step are complete.

microbatches ─▶ sum over microbatches, tied weights and data-parallel ranks ─▶ hook ─▶ added to .grad of earlier steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from pipegraph.errors import PipegraphError, user_line
from pipegraph.kernels.sharded import is_sharded
from pipegraph.runtime.parameters import parameters_of
from pipegraph.torch_private.tensors import take_hooks

_GRADIENT: Final = "register_hook"


Hooks = list[tuple[str, Callable[..., Any]]]
"""The methods that register the hooks of a parameter, and the hooks."""


class GradientHooks:
    """The hooks of the parameters of a process's stages.

    Args:
        stages: as they were loaded. The hooks of their own source are removed from their parameters.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._hooks: dict[int, dict[str, Hooks]] = {}
        for index, stage in stages.items():
            taken = {name: take_hooks(tensor, type(stage).__module__) for name, tensor in stage.named_parameters()}
            if any(taken.values()):
                self._hooks[index] = {name: hooks for name, hooks in taken.items() if hooks}

    def check(self, stages: Mapping[int, nn.Module], sharded: frozenset[int]) -> None:
        """Check that the gradients are complete where the hooks are called.

        Args:
            stages: as they run.
            sharded: the stages whose parameters are divided along ``dp_shard``.

        Raises:
            PipegraphError: a rank has a part of a parameter that has a hook.
        """
        for index, name, parameter, _ in self._with_parameters(stages):
            if index in sharded or is_sharded(parameter):
                raise PipegraphError(
                    f"{name} of stage {index} has a hook in the model, which takes the complete gradient: along "
                    "dp_shard and tp each rank has a part of it.",
                    "a mesh of pp and dp_replicate; or the model without the hook, and .grad changed after step().",
                )

    @contextmanager
    def during_step(self, stages: Mapping[int, nn.Module]) -> Iterator[None]:
        """A context around a step that trains: at its end the hooks are called with the gradient of the step alone.

        If the step or a hook fails, `.grad` has what was added until then, as it is without hooks.

        Raises:
            PipegraphError: a hook raises an error, or returns what cannot be the gradient.
        """
        hooks: dict[nn.Parameter, tuple[str, Hooks]] = {}
        for index, name, parameter, parameter_hooks in self._with_parameters(stages):
            # A tied weight is one parameter, with one list of hooks.
            hooks.setdefault(parameter, (f"{name} of stage {index}", parameter_hooks))
        previous_gradients = {parameter: parameter.grad for parameter in hooks}
        for parameter in hooks:
            parameter.grad = None
        try:
            yield
            trained = [parameter for parameter in hooks if parameter.grad is not None]
            with torch.no_grad():
                for parameter, (name, parameter_hooks) in hooks.items():
                    _call_gradient_hooks(parameter, name, parameter_hooks)
        finally:
            with torch.no_grad():
                for parameter, gradient in previous_gradients.items():
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        with torch.no_grad():
            for parameter in trained:
                _call_accumulated_hooks(parameter, *hooks[parameter])

    def _with_parameters(self, stages: Mapping[int, nn.Module]) -> Iterator[tuple[int, str, nn.Parameter, Hooks]]:
        """Yield the parameters that have hooks; none that `parallelize_fn` has replaced by one of another name."""
        for index, hooks in self._hooks.items():
            for name, parameter in parameters_of(stages[index]):
                if name in hooks:
                    yield index, name, parameter, hooks[name]


def _call_gradient_hooks(parameter: nn.Parameter, name: str, hooks: Hooks) -> None:
    """Replace the gradient of a step by what the hooks return."""
    gradient = parameter.grad
    for method, hook in hooks:
        if method == _GRADIENT and gradient is not None:
            result = _called(name, hook, gradient)
            if result is not None and (result.shape, result.dtype) != (gradient.shape, gradient.dtype):
                raise PipegraphError(
                    f"The hook of {name} returned {result.dtype} of {[*result.shape]} for a gradient that is "
                    f"{gradient.dtype} of {[*gradient.shape]}.",
                    "a hook that returns gradient.dtype, or the dtype in which the model was captured.",
                )
            gradient = gradient if result is None else result
    parameter.grad = gradient


def _call_accumulated_hooks(parameter: nn.Parameter, name: str, hooks: Hooks) -> None:
    for method, hook in hooks:
        if method != _GRADIENT:
            _called(name, hook, parameter)


def _called(name: str, hook: Callable[..., Any], argument: torch.Tensor) -> Any:
    try:
        return hook(argument)
    except Exception as error:  # whatever a hook raises
        line = user_line(error)
        raise PipegraphError(
            f"The hook of {name} failed: {type(error).__name__}: {error}{f' (at {line})' if line else ''}.",
            "the model without it, and .grad changed after step().",
        ) from error
