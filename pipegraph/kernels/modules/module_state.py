"""The tensors that a module computes with, in a fixed order, and the module run on others in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from pipegraph.kernels.sharded import rebuilt

Place = tuple[nn.Module, bool, str]
"""(the module, whether a parameter, the attribute)."""

_LISTS = ("_flat_weights", "_flat_weight_refs")
"""What an RNN keeps beside its weights, and makes anew when these are other ones."""


class ModuleState:
    """The parameters and buffers of modules, each once, however many names it has."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        places: dict[int, list[Place]] = {}
        parts = list(modules)
        for part in parts:
            for is_parameter, held in ((True, part._parameters), (False, part._buffers)):
                for name, tensor in held.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append((part, is_parameter, name))
        self._places = tuple(map(tuple, places.values()))
        self._first = [_holder(each[0]) for each in self._places]
        self._recurrent = [part for part in parts if hasattr(part, "_flat_weights_names")]

    def __len__(self) -> int:
        return len(self._places)

    def tensors(self) -> list[Tensor]:
        """What stands there now: a parameter may have been put in the place of another one."""
        return [held[name] for held, name in self._first]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the modules compute with `tensors`, in the order of `tensors()`; in place of a DTensor stands its local
        tensor among them. RuntimeError where they put other ones there."""
        before = self.tensors()
        put = [rebuilt(tensor, like) for tensor, like in zip(tensors, before, strict=True)]
        lists = [(vars(part), name) for part in self._recurrent for name in _LISTS if name in vars(part)]
        listed = [held[name] for held, name in lists]
        self._put(put)
        try:
            yield
            for places, tensor in zip(self._places, put, strict=True):
                for module, is_parameter, name in places:
                    if _holder((module, is_parameter, name))[0].get(name) is not tensor:
                        raise RuntimeError(f"its forward sets {type(module).__name__}.{name}")
        finally:
            self._put(before)
            for (held, name), value in zip(lists, listed, strict=True):
                held[name] = value

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for places, tensor in zip(self._places, tensors, strict=True):
            for place in places:
                held, name = _holder(place)
                held[name] = tensor
        for part in self._recurrent:
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]  # type: ignore


def _holder(place: Place) -> tuple[dict[str, Tensor], str]:
    module, is_parameter, name = place
    return (module._parameters if is_parameter else module._buffers), name  # type: ignore[return-value]
