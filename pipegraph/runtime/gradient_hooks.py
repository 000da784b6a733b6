"""Hooks of parameters that the model has: called once for the gradient of a step, as a backward of the batch would.

A hook that clips gives other numbers for the gradient of each microbatch. So the hooks that a stage registers are taken
off its parameters, and called when the gradients of a step are complete.

microbatches ─▶ sum over microbatches, tied weights and data-parallel ranks ─▶ hook ─▶ added to .grad of earlier steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.sharded import is_sharded
from pipegraph.runtime.parameters import parameters_of
from pipegraph.torch_private.tensors import take_hooks

_GRADIENT: Final = "register_hook"


class ParameterHooks(NamedTuple):
    """The hooks of a parameter.

    Attributes:
        stage: the index of its stage.
        name: of the parameter in the stage.
        hooks: the methods that register them, and the hooks.
    """

    stage: int
    name: str
    hooks: list[tuple[str, Callable[..., Any]]]


class GradientHooks:
    """The hooks of the parameters of a process's stages.

    Args:
        stages: as they were loaded. The hooks of their own source are removed from their parameters.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._hooks = [
            ParameterHooks(index, name, hooks)
            for index, stage in stages.items()
            for name, parameter in stage.named_parameters()
            if (hooks := take_hooks(parameter, type(stage).__module__))
        ]

    def check(self, stages: Mapping[int, nn.Module], sharded: frozenset[int]) -> None:
        """Check that the gradients are complete where the hooks are called.

        Args:
            stages: as they run.
            sharded: the stages whose parameters are divided along ``dp_shard``.

        Raises:
            PipegraphError: a rank has a part of a parameter that has a hook.
        """
        for index, name, _ in self._hooks:
            if index in sharded or any(is_sharded(parameter) for parameter in self._parameters(stages, index, name)):
                raise PipegraphError(
                    f"{name} of stage {index} has a hook in the model, which takes the complete gradient: along "
                    "dp_shard and tp each rank has a part of it.",
                    "a mesh of pp and dp_replicate; or the model without the hook, and .grad changed after step().",
                )

    @contextmanager
    def during_step(self, stages: Mapping[int, nn.Module]) -> Iterator[None]:
        """A context around a step that trains: at its end the hooks are called with the gradient of the step alone."""
        hooks: dict[nn.Parameter, list[tuple[str, Callable[..., Any]]]] = {}
        for index, name, parameter_hooks in self._hooks:
            for parameter in self._parameters(stages, index, name):
                hooks.setdefault(parameter, parameter_hooks)  # that of a tied weight is one in the model
        previous_gradients = {parameter: parameter.grad for parameter in hooks}
        for parameter in hooks:
            parameter.grad = None
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            with torch.no_grad():
                for parameter, parameter_hooks in hooks.items():
                    _finish(parameter, previous_gradients[parameter], parameter_hooks if is_complete else [])

    @staticmethod
    def _parameters(stages: Mapping[int, nn.Module], index: int, name: str) -> list[nn.Parameter]:
        """The parameter of this name; none if `parallelize_fn` has put something else in its place."""
        return [parameter for parameter_name, parameter in parameters_of(stages[index]) if parameter_name == name]


def _finish(
    parameter: nn.Parameter, previous_gradient: torch.Tensor | None, hooks: list[tuple[str, Callable[..., Any]]]
) -> None:
    """Call the hooks of a parameter, and add its gradient to that of earlier steps."""
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = previous_gradient
        return
    for method, hook in hooks:
        if method == _GRADIENT:
            result = hook(gradient)
            gradient = gradient if result is None else result
    parameter.grad = gradient if previous_gradient is None else previous_gradient.add_(gradient)
    for method, hook in hooks:
        if method != _GRADIENT:
            hook(parameter)
