"""Runs of equal layers in the lists of a model, and the model without most of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from pipegraph.torch_private.modules import is_persistent
from pipegraph.torch_private.tensors import has_hooks

KEPT_UNITS: Final = 3
"""Units that are captured: the last is captured after one that is captured after another."""
_LONGEST_PERIOD: Final = 8
_LEAST_LEFT_OUT: Final = 5  # layers; running the whole model on fake tensors takes the time of about one


@dataclass(frozen=True)
class LayerRun:
    """Units of consecutive layers of a list that are equal: single layers, or a period of layers of several kinds.

    Attributes:
        name: of the list.
        start: its first layer.
        period: how many layers a unit has.
        units: how many units there are.
        layers: the list.
    """

    name: str
    start: int
    period: int
    units: int
    layers: nn.Module = field(repr=False)

    @property
    def template(self) -> range:
        """The indices of the layers whose operations are those of all that are left out."""
        stop = self.start + KEPT_UNITS * self.period
        return range(stop - self.period, stop)

    @property
    def left_out(self) -> range:
        """The indices of the layers that are left out."""
        return range(self.template.stop, self.start + self.units * self.period)

    @property
    def equal_layers(self) -> dict[str, nn.Module]:
        """The layers of the run, by their names."""
        layers = list(self.layers.children())
        return {self.prefix(index): layers[index] for index in range(self.start, self.left_out.stop)}

    def prefix(self, index: int) -> str:
        """The name of a layer."""
        return f"{self.name}.{index}"


def layer_runs(model: nn.Module) -> list[LayerRun]:
    """Return the runs of equal layers that are worth to be captured in part: at most one of a list, and none inside of
    a list that has one."""
    if _shares_layers(model):
        return []
    runs: list[LayerRun] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(_is_inside(name, run.name) for run in runs):
            continue
        if name and list(module._modules) == [str(number) for number in range(len(module))]:
            candidates = (_longest_run(name, module, period) for period in range(1, _LONGEST_PERIOD + 1))
            best = max(candidates, key=lambda run: len(run.left_out))
            runs += [best] if len(best.left_out) >= _LEAST_LEFT_OUT else []
    return runs


def _longest_run(name: str, layers: nn.ModuleList | nn.Sequential, period: int) -> LayerRun:
    """The run with most units of a number of layers; the first one of several."""
    best = LayerRun(name, 0, period, 0, layers)
    modules, start = list(layers.children()), 0
    for index in range(period, len(modules) + 1):
        if index == len(modules) or not _are_equal(modules[index - period], modules[index], period):
            run = LayerRun(name, start, period, (index - start) // period, layers)
            best = max(best, run, key=lambda candidate: candidate.units)
            start = index - period + 1
    return best


def _shares_layers(model: nn.Module) -> bool:
    """Return whether a tensor that has several names is in a list of layers."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parts = {part for group in names.values() if len(group) > 1 for name in group for part in name.split(".")}
    return any(part.isdecimal() for part in parts)


def _is_inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


_HOOKS: Final = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_CHILDREN: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS)


def _are_equal(module: nn.Module, next_module: nn.Module, step: int) -> bool:
    """Return whether two modules differ in nothing but their tensors, and numbers that are larger by ``step``."""
    if type(module) is not type(next_module) or module is next_module or module.training != next_module.training:
        return False
    if any(vars(owner).get(name) for owner in (module, next_module) for name in _HOOKS):
        return False
    attributes, next_attributes = (
        {name: value for name, value in vars(owner).items() if name not in _CHILDREN} for owner in (module, next_module)
    )
    if attributes.keys() != next_attributes.keys() or not all(
        _same_value(value, next_attributes[name], step) for name, value in attributes.items()
    ):
        return False
    for kind in ("_parameters", "_buffers", "_modules"):
        if list(vars(module)[kind]) != list(vars(next_module)[kind]):
            return False
    tensors = zip(module._parameters.values(), next_module._parameters.values(), strict=True)
    buffers = zip(module._buffers.values(), next_module._buffers.values(), strict=True)
    if not all(_same_form(first, second) for first, second in tensors):
        return False
    if not all(_same_form(first, second) and _same_numbers(first, second) for first, second in buffers):
        return False
    if any(is_persistent(module, name) != is_persistent(next_module, name) for name in module._buffers):
        return False
    children = zip(module._modules.values(), next_module._modules.values(), strict=True)
    return all(
        first is second is None or (first is not None and second is not None and _are_equal(first, second, step))
        for first, second in children
    )


def _same_value(value: Any, next_value: Any, step: int) -> bool:
    if value is next_value:
        return True
    if type(value) is not type(next_value):
        return False
    if type(value) is int:
        return value == next_value or next_value - value == step
    if isinstance(value, (tuple, list)):
        return len(value) == len(next_value) and all(
            _same_value(*pair, 0) for pair in zip(value, next_value, strict=True)
        )
    if isinstance(value, dict):
        return value.keys() == next_value.keys() and all(_same_value(value[key], next_value[key], 0) for key in value)
    if isinstance(value, (bool, float, str, torch.dtype, torch.device, torch.Size)):
        return bool(value == next_value)
    # Such as what attention of diffusers runs
    return hasattr(value, "__dict__") and not hasattr(value, "__code__") and _same_object(value, next_value)


def _same_object(value: Any, next_value: Any) -> bool:
    """Return whether two objects of a class outside of torch have equal attributes, and no slots."""
    cls = type(value)
    is_plain = not isinstance(value, (nn.Module, torch.Tensor, type)) and cls.__module__.split(".")[0] != "torch"
    return is_plain and not hasattr(cls, "__slots__") and _same_value(vars(value), vars(next_value), 0)


def _same_form(tensor: torch.Tensor | None, next_tensor: torch.Tensor | None) -> bool:
    if tensor is None or next_tensor is None:
        return tensor is next_tensor
    is_alike = (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride()) == (
        next_tensor.shape,
        next_tensor.dtype,
        next_tensor.device,
        next_tensor.requires_grad,
        next_tensor.stride(),
    )
    is_hooked = has_hooks(tensor) or has_hooks(next_tensor)
    return is_alike and type(tensor) is type(next_tensor) and tensor is not next_tensor and not is_hooked


def _same_numbers(tensor: torch.Tensor | None, next_tensor: torch.Tensor | None) -> bool:
    if tensor is None or next_tensor is None or tensor.is_meta:
        return True
    return torch.equal(tensor, next_tensor)


@contextmanager
def few_layers(runs: Sequence[LayerRun]) -> Iterator[None]:
    """A context in which the lists of a model have of their runs the first `KEPT_UNITS` units alone."""
    contents = [dict(run.layers._modules) for run in runs]
    try:
        for run in runs:
            layers = list(run.layers._modules.values())
            kept_layers = [*layers[: run.template.stop], *layers[run.left_out.stop :]]
            run.layers._modules.clear()
            run.layers._modules.update({str(number): layer for number, layer in enumerate(kept_layers)})
        yield
    finally:
        for run, modules in zip(runs, contents, strict=True):
            run.layers._modules.clear()
            run.layers._modules.update(modules)
