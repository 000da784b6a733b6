"""Why a model cannot be exported, with its line and what to do, from what torch raises."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Final

import torch
from torch import nn

from pipegraph.errors import CaptureError, user_line

# What is compared with a random number to leave something out, as `layerdrop` of transformers is.
_PROBABILITY: Final = re.compile(r"[<>]=? *self\.(\w*drop\w*)(?![\w(.])")
_RETURNED: Final = re.compile(r"Found <class '(?P<path>[^']+)'> in output, which is not a known type")
_DISTRIBUTIONS: Final = Path(torch.__file__).parent / "distributions"


def explanation(model: nn.Module, error: Exception, mode: str = "") -> str:
    """The message of a `CaptureError`: the problem, the line of the user's source, and advice.

    Args:
        mode: `` in training mode`` if that alone cannot be captured, or `` in evaluation mode``.
    """
    if isinstance(error, CaptureError):
        return f"{type(model).__name__} cannot be captured{mode}. {error}"
    where = user_line(error)
    problem = summary(error)
    advice = (
        "the model on its example inputs in Python. If that fails too, fix the inputs or the model; if not, "
        f"{'the line above' if where else 'something in it'} is Python that torch.export cannot follow"
    )
    if returned := _RETURNED.search(str(error)):
        problem, advice = _of_returned(returned["path"])
    elif _depends_on_values(error) and _passes_through(error, _DISTRIBUTIONS):
        problem = "a distribution of torch.distributions checks its arguments by their values"
        advice = "validate_args=False in the call that creates it"
    elif _depends_on_values(error):
        advice = "for a branch, compute both sides and choose with torch.where; for a number, pass it as an argument"
        if chance := _PROBABILITY.search(where or ""):
            advice = f"{chance[1]}=0 where the model is built, which needs no branch; {advice}"
    if mode == " in training mode":
        advice += "; or model.eval() in build_model, for stages that do not train"
    at = f"\n  at {where}" if where else ""
    return f"{type(model).__name__} cannot be captured{mode}: {problem}.{at}\nTry: {advice}."


def _of_returned(path: str) -> tuple[str, str]:
    """The problem with a model that returns an object of a class, and what to do."""
    name = path.rpartition(".")[2]
    problem = f"it returns a {name}, and the outputs of a model are tensors"
    if path.startswith("torch.distributions."):
        return problem, "its parameters, such as the mean and the scale, as outputs, and the distribution in loss_fn"
    if "Cache" in name:
        return (
            problem,
            'use_cache=False among the inputs, kwargs={"use_cache": False}; or model.config.use_cache = False',
        )
    return (
        problem,
        f"tensors, or tuples, lists and dicts of them; of a dataclass torch.export.register_dataclass({name})",
    )


def _passes_through(error: BaseException, folder: Path) -> bool:
    """Whether an error was raised in a file of a folder, or by what such a file called."""
    return any(folder in Path(frame.filename).parents for frame in traceback.extract_tb(error.__traceback__))


def at_line(problem: str, error: Exception) -> str:
    return ", at ".join(filter(None, (problem, user_line(error))))


def summary(error: Exception) -> str:
    """The problem, in one line."""
    if _depends_on_values(error):
        return "what it does depends on the values of a tensor, which are not known while it is traced"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, CaptureError):
        return lines[0].rstrip(".")
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _depends_on_values(error: Exception) -> bool:
    return "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__
