"""Predictions of steps, for manifests that tests make up."""

from __future__ import annotations

from typing import Any

from pipegraph.package import PlanEntry
from pipegraph.package.prediction import Cut, Prediction

MIB = 2**20


def prediction(stages: int, ranks: int | None = None, boundary_bytes: int = MIB, **changes: Any) -> Prediction:
    """A step of 0.1 s of 1F1B, a stage or more on each rank."""
    ranks = ranks or stages
    cuts = tuple(Cut(f"layers.{at}", boundary_bytes, None, None) for at in range(1, stages))
    defaults: dict[str, Any] = {
        "balance": "time",
        "recompute": "min-cut",
        "hardware": "here",
        "unit": "s",
        "schedule": "1f1b",
        "placement": tuple(at % ranks for at in range(stages)),
        "microbatches": 4,
        "value": 0.1,
        "places": 3,
        "lower_bound": 0.1,
        "memory": (MIB,) * ranks,
        "cuts": cuts,
    }
    return Prediction(**defaults | changes)


def plan(stages: int, **changes: Any) -> PlanEntry:
    """The plan of a manifest with such a prediction."""
    return PlanEntry(prediction=prediction(stages, **changes))
