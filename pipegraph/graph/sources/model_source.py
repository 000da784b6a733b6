"""What a source of models gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ModelSource:
    """A model and what is needed to capture, check and train it; ``args`` and ``kwargs`` are one microbatch."""

    name: str
    sha256: str
    model: nn.Module = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)
    loss_fn: Callable[..., torch.Tensor] | None = None
    example_target: Any = field(default=None, repr=False)
