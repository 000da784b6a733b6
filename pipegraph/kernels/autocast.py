"""Regions of autocast: which ones a graph is traced in, and how to enter the same ones again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

AutocastState = tuple[tuple[bool, torch.dtype], ...]
"""Of each device type, whether autocast is on, and its dtype."""

_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def autocast_state() -> AutocastState:
    """Return the state of autocast here."""
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES)


def autocast_number(device: str) -> int:
    """Return a number for the state of autocast on a type of device: 0 if it is off."""
    return 1 + _DTYPES.index(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else 0


@contextmanager
def autocast_as(state: AutocastState) -> Iterator[None]:
    """Run the inside under this state of autocast."""
    with ExitStack() as stack:
        for device, device_state, current in zip(_DEVICES, state, autocast_state(), strict=True):
            if device_state != current:
                enabled, dtype = device_state
                stack.enter_context(torch.autocast(device, dtype, enabled))
        yield


@contextmanager
def without_autograd_and_autocast() -> Iterator[None]:
    """Run graphs in which both were traced."""
    with torch.no_grad(), autocast_as(tuple((False, dtype) for _, dtype in autocast_state())):
        yield
