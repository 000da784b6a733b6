"""Changes to parameters and buffers through ``.data``, which no call of Python shows."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipegraph.side_effects import Effect, EffectCall, Notes

_DATA_OF_PARAMETER: Final = Effect(
    "assigns to .data of a parameter or buffer",
    "a stage would not",
    "with torch.no_grad(): p.copy_(...) on a buffer; a parameter that training does not change can be a buffer",
)
_DATA_CHANGED: Final = Effect(
    "changes a parameter or buffer through .data",
    "torch.export cannot follow that",
    "with torch.no_grad(): around the same on the buffer itself: self.sizes.mul_(0.8)",
)
_GET_DATA: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class DataChanges(TorchFunctionMode):
    """Notes changes to parameters and buffers through ``.data``, which no call of Python shows.

    Args:
        model: with the tensors that it is run with.
        notes: to which they are added.
    """

    def __init__(self, model: nn.Module, notes: Notes) -> None:
        super().__init__()
        self._notes = notes
        self._state = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._data: dict[int, Any] = {}  # holds them, so that an id stays its own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == _SET_DATA and id(args[0]) in self._state:
            self._add(_DATA_OF_PARAMETER)
        elif func == _GET_DATA and id(args[0]) in self._state:
            self._data[id(result)] = result
        elif args and id(args[0]) in self._data and _is_in_place(getattr(func, "__name__", "")):
            self._data[id(result)] = result
            self._add(_DATA_CHANGED)
        return result

    def _add(self, effect: Effect) -> None:
        frame = inspect.currentframe()
        line = self._notes.line_of(frame.f_back.f_back if frame is not None and frame.f_back is not None else None)
        if line is not None:
            self._notes.calls.append(EffectCall(effect, line))


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
