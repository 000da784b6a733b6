"""The tensors in what a model returns, and their loss where nobody gives one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def mean_square(output: Any, target: Any = None) -> Tensor:
    """The loss where none is given: the mean over the floating-point outputs' mean squares; 0 without any."""
    squares = [
        tensor.float().square().mean() for tensor in output_tensors(output).values() if tensor.is_floating_point()
    ]
    return torch.stack(squares).mean() if squares else torch.zeros(())


def output_tensors(structure: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors in nested dicts, sequences and dataclasses, under their paths: ``{"hidden.0": …}``."""
    if isinstance(structure, Tensor):
        return {path: structure}
    if isinstance(structure, dict):
        items = [(str(key), item) for key, item in structure.items()]
    elif isinstance(structure, (list, tuple)):
        items = [(str(index), item) for index, item in enumerate(structure)]
    elif is_dataclass(structure):
        items = [(field.name, getattr(structure, field.name)) for field in fields(structure)]
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, item in items:
        found |= output_tensors(item, f"{path}.{key}" if path else key)
    return found
