"""Values that are no tensors of the model, as bytes in a tensor: states of schedulers, options of optimizers."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch
from torch import Tensor

from pipegraph.errors import CheckpointError


def encoded(value: Any, name: str) -> Tensor:
    """The bytes of a value [uint8]. Raises CheckpointError if they could not be read back without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        decoded(buffer.getvalue())
    except Exception as error:  # of pickle or torch, about any class of the user's
        why = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name} cannot be saved, because it holds more than tensors and plain values: {why}\n"
            "Try: numbers, strings, tensors, and lists and dicts of them; or "
            "torch.serialization.add_safe_globals([…]) for a class of your own."
        ) from error
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def decoded(data: bytes | Tensor) -> Any:
    """The value of its bytes."""
    content = data.numpy().tobytes() if isinstance(data, Tensor) else data
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def fingerprint(data: Tensor) -> str:
    """Tells bytes apart from others."""
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
