"""Why a model cannot be captured, in the words and at the line of its author."""

from __future__ import annotations

from torch import nn

from pipegraph.errors import user_line


def summary(error: Exception) -> str:
    """What went wrong, in a line."""
    if _depends_on_values(error):
        return "what it does depends on the values of a tensor, which are not known while it is traced"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _depends_on_values(error: Exception) -> bool:
    return "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__


def explain(model: nn.Module, error: Exception) -> str:
    """What export says, where in the user's source, and what to try."""
    where = user_line(error)
    advice = (
        "model(*example_inputs) in Python. If that fails too, mend the inputs or the model; if not, "
        f"{'the line above' if where else 'something in it'} is Python that torch.export cannot follow"
    )
    if _depends_on_values(error):
        advice = "for a branch, compute both sides and choose with torch.where; for a number, pass it as an argument"
    at = f"\n  at {where}" if where else ""
    return f"{type(model).__name__} cannot be captured: {summary(error)}.{at}\nTry: {advice}."
