"""Find code that does something else on another kind of device than on the one that is captured."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipegraph.errors import is_user_file
from pipegraph.graph.export.operation_record import without_memory
from pipegraph.graph.internals import pytree


def device_branch(
    model: nn.Module, mode: Mapping[nn.Module, bool], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Run a model without memory, as it is and as if it were on the other kind of device: a CPU or a GPU.

    Functions of torch are compared, and not the operations below them, which torch itself chooses by the device.

    Args:
        mode: whether each module is in training mode.
        args, kwargs: its inputs; only their shapes, dtypes and devices count.

    Returns:
        what differs first, with its lines; empty if nothing does, or if the model cannot run there without memory.
    """
    devices = {leaf.device.type for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    here, other = ("cuda", "cpu") if "cuda" in devices else ("cpu", "cuda")
    try:
        own, there = (_calls(model, mode, args, kwargs, device) for device in (None, other))
    except Exception:  # a model that moves its tensors to a device by name, say
        return ""
    for one, two in zip_longest(own, there):
        if one is None or two is None or one[0] != two[0]:
            return f"{_described(one)} on {here}, and {_described(two)} on {other}"
    return ""


_Calls = list[tuple[str, str]]


def _described(call: tuple[str, str] | None) -> str:
    return "ends" if call is None else f"calls {call[0]} at {call[1]}" if call[1] else f"calls {call[0]}"


def _calls(
    model: nn.Module, mode: Mapping[nn.Module, bool], args: tuple[Any, ...], kwargs: dict[str, Any], device: str | None
) -> _Calls:
    where = None if device is None else torch.device(device, 0) if device != "cpu" else torch.device(device)
    with without_memory(model, args, kwargs, where) as (fake_args, fake_kwargs):
        for module, training in mode.items():
            module.training = training
        with _FunctionRecord() as record:
            model(*fake_args, **fake_kwargs)
    return record.calls


class _FunctionRecord(TorchFunctionMode):
    """Lists the functions of torch that a model calls, each with its line in the model's source."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: _Calls = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name != "__get__":  # an attribute
            self.calls.append((name, _line(inspect.currentframe())))
        return func(*args, **(kwargs or {}))


def _line(frame: FrameType | None) -> str:
    """The innermost line of the model's own source."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@cache
def _is_users(file: str) -> bool:
    return is_user_file(file)
