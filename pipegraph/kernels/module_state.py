"""The parameters and buffers of modules in a fixed order, and the modules run on other tensors in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from pipegraph.kernels import internals
from pipegraph.kernels.sharded import rebuilt


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in a module: `held` is the module's dict of parameters or of buffers."""

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
        self._recurrent = [module for module in modules if internals.rnn_weight_lists(module)]

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
        weight_lists = [(module, internals.rnn_weight_lists(module)) for module in self._recurrent]
        self._put(replacements)
        try:
            yield
            for places, tensor in zip(self._places, replacements, strict=True):
                for place in places:
                    if place.held.get(place.name) is not tensor:
                        raise RuntimeError(f"its forward sets {type(place.module).__name__}.{place.name}")
        finally:
            self._put(before)
            for module, lists in weight_lists:
                vars(module).update(lists)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for places, tensor in zip(self._places, tensors, strict=True):
            for place in places:
                place.held[place.name] = tensor
        for module in self._recurrent:
            internals.renew_rnn_weights(module)
