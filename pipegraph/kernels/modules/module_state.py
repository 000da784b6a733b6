"""The parameters and buffers of modules in a fixed order, and the modules run on other tensors in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from pipegraph.kernels import internals
from pipegraph.kernels.sharded import rebuilt

_RECURRENT_LISTS = ("_flat_weights", "_flat_weight_refs")
"""Copies of its weights that an RNN keeps, and makes again when the weights are other tensors."""


@dataclass(frozen=True)
class _Place:
    """Where a module holds a tensor: `held` is its dict of parameters or of buffers."""

    module: nn.Module
    held: dict[str, Tensor | None]
    name: str


class ModuleState:
    """The parameters and buffers of modules, each once, however many names it has."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        places: dict[int, list[_Place]] = {}
        for module in modules:
            for held in internals.tensor_dicts(module):
                for name, tensor in held.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append(_Place(module, held, name))
        self._places = list(places.values())
        self._recurrent = [module for module in modules if hasattr(module, "_flat_weights_names")]

    def __len__(self) -> int:
        return len(self._places)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the modules hold now, which may be others than when this was made."""
        return [places[0].held[places[0].name] for places in self._places]  # type: ignore[misc]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the modules compute with `tensors`, in the order of `tensors()`.

        A DTensor is replaced by the DTensor around the given local tensor. Raises RuntimeError if the modules
        themselves put other tensors there.
        """
        before = self.tensors()
        replacements = [rebuilt(tensor, like) for tensor, like in zip(tensors, before, strict=True)]
        lists = [
            (vars(module), name) for module in self._recurrent for name in _RECURRENT_LISTS if hasattr(module, name)
        ]
        lists_before = [attributes[name] for attributes, name in lists]
        self._put(replacements)
        try:
            yield
            for places, tensor in zip(self._places, replacements, strict=True):
                for place in places:
                    if place.held.get(place.name) is not tensor:
                        raise RuntimeError(f"its forward sets {type(place.module).__name__}.{place.name}")
        finally:
            self._put(before)
            for (attributes, name), value in zip(lists, lists_before, strict=True):
                attributes[name] = value

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for places, tensor in zip(self._places, tensors, strict=True):
            for place in places:
                place.held[place.name] = tensor
        for module in self._recurrent:
            names: list[str] = module._flat_weights_names  # type: ignore[assignment]
            module._flat_weights = [getattr(module, name, None) for name in names]  # type: ignore[assignment]
