"""Why a model cannot be captured, in the words and at the line of its author."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import torch
from torch import nn

_TORCH = Path(torch.__file__).parent


def summary(error: Exception) -> str:
    """What went wrong, in a line."""
    if _depends_on_values(error):
        return "its control flow depends on the values of a tensor, which are not known while it is traced"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _depends_on_values(error: Exception) -> bool:
    return "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__


def explain(model: nn.Module, error: Exception) -> str:
    """What export says, where in the user's source, and what to try."""
    advice = "run the model on its example inputs; what works there and not here is Python that export cannot follow"
    if _depends_on_values(error):
        advice = "compute both branches and choose with torch.where"
    where = _user_line(error)
    at = f"\n  at {where[0]}: {where[1]}" if where is not None else ""
    return f"{type(model).__name__} cannot be captured: {summary(error)}.{at}\nTry: {advice}."


def _user_line(error: Exception) -> tuple[str, str] | None:
    """The innermost line of the model's own source that the error, or what caused it, passed through."""
    found = None
    current: BaseException | None = error
    while current is not None and found is None:
        for frame in traceback.extract_tb(current.__traceback__):
            if _is_of_model(Path(frame.filename)):
                found = (f"{frame.filename}:{frame.lineno}", frame.line or "")
        current = current.__cause__ or current.__context__
    return found


def _is_of_model(file: Path) -> bool:
    """Whether a file is neither torch's, nor pipegraph's, nor Python's own (libraries may lie in Python's folder)."""
    ours = (_TORCH, Path(__file__).parents[1])
    library = Path(os.__file__).parent
    standard = library in file.parents and "site-packages" not in file.parts
    return file.is_file() and not standard and not any(folder in file.parents for folder in ours)
