"""What a source of models gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


_META_TWIN = "_pipegraph_meta_twin"


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters registered inside land on the meta device; buffers and plain tensors keep their values.

    A rotary table computed in ``__init__`` is a buffer and must survive, so ``torch.device("meta")`` will not do. A
    parameter is replaced the moment it is registered, before ``reset_parameters`` could touch its pages. One object
    registered twice (a tied weight) stays one object.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            twin = getattr(param, _META_TWIN, None)
            if twin is None:
                twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                setattr(param, _META_TWIN, twin)
            param = twin
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
