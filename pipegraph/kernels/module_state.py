"""The parameters and buffers of modules: in a fixed order, replaced while modules run, and given their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.kernels.sharded import is_sharded, layout, local, rebuilt
from pipegraph.kernels.symbolic.symbolic_sizes import are_equal
from pipegraph.torch_private.modules import renew_rnn_weights, rnn_weight_lists, tensor_dicts
from pipegraph.torch_private.tensors import add_all


@dataclass(frozen=True)
class _TensorPlace:
    """The place of a tensor in a module: `tensors` is the module's dict of parameters or of buffers."""

    module: nn.Module
    tensors: dict[str, Tensor | None]
    name: str


class ModuleState:
    """The parameters and buffers of modules, each once, however many names it has."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        places: dict[int, list[_TensorPlace]] = {}
        for module in modules:
            for tensors in tensor_dicts(module):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append(_TensorPlace(module, tensors, name))
        self._places = list(places.values())
        self._recurrent = [module for module in modules if rnn_weight_lists(module)]

    def __len__(self) -> int:
        return len(self._places)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the modules hold now, which may be others than when this was made."""
        return [places[0].tensors[places[0].name] for places in self._places]  # type: ignore[misc]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the modules compute with `tensors`, in the order of `tensors()`.

        A DTensor is replaced by the DTensor around the given local tensor. Raises RuntimeError if the modules
        themselves put other tensors there.
        """
        previous_tensors = self.tensors()
        replacements = [rebuilt(tensor, like) for tensor, like in zip(tensors, previous_tensors, strict=True)]
        weight_lists = [(module, rnn_weight_lists(module)) for module in self._recurrent]
        self._set_tensors(replacements)
        try:
            yield
            for places, tensor in zip(self._places, replacements, strict=True):
                for place in places:
                    if place.tensors.get(place.name) is not tensor:
                        raise RuntimeError(f"its forward sets {type(place.module).__name__}.{place.name}")
        finally:
            self._set_tensors(previous_tensors)
            for module, lists in weight_lists:
                vars(module).update(lists)

    def _set_tensors(self, tensors: Sequence[Tensor]) -> None:
        for places, tensor in zip(self._places, tensors, strict=True):
            for place in places:
                place.tensors[place.name] = tensor
        for module in self._recurrent:
            renew_rnn_weights(module)


def with_strides(tensor: Tensor, strides: Sequence[Any]) -> Tensor:
    """Return the tensor with the strides that graphs were traced for: a copy if it has others."""
    if are_equal(tensor.stride(), strides):
        return tensor
    copy = torch.empty_strided(tensor.shape, list(strides), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def accumulate(pairs: Iterable[tuple[Tensor, Tensor]], shared: Sequence[Tensor | None] = ()) -> None:
    """Add gradients to the `.grad` of parameters.

    A parameter's first gradient becomes its `.grad` without a copy, if it has the parameter's dtype and its strides,
    which optimizers and others rely on.

    Args:
        pairs: (parameter, gradient). The gradient of a DTensor is its local tensor, in the parameter's placements. A
            gradient shares its memory with no other tensor, unless it comes twice or is `shared`.
        shared: tensors that others hold too.
    """
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    used_ids = set(map(id, shared))
    for parameter, gradient in pairs:
        if parameter.grad is None:
            local_gradient = _laid_out(gradient, local(parameter))
            if not local_gradient.is_sparse:
                local_gradient = local_gradient.to(parameter.dtype)  # of one that is computed with in fewer bits
            if id(local_gradient) in used_ids:
                local_gradient = local_gradient.clone()
            used_ids.add(id(local_gradient))
            parameter.grad = rebuilt(local_gradient, parameter)
        elif (own_sum := gradient_in_place(parameter)) is not None:
            sums.append(own_sum)
            addends.append(gradient)
        else:  # the user put a gradient there, in another layout
            parameter.grad = parameter.grad + rebuilt(gradient, parameter)
    if sums:
        add_all(sums, addends)


def gradient_in_place(parameter: Tensor) -> Tensor | None:
    """Return what this rank holds of a parameter's `.grad`, if a gradient can be added to that."""
    gradient = parameter.grad
    if gradient is None or (is_sharded(parameter) and layout(gradient) != layout(parameter)):
        return None
    return local(gradient)


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.is_sparse or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
