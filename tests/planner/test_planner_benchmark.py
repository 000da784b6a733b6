"""`python -m benchmarks.planner`: predictions are compared with measurements."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import pipegraph
from benchmarks.planner.__main__ import _errors, _predicted_step


@pytest.fixture(scope="module")
def cut() -> dict[str, Any]:
    """A cut whose steps and F took twice what was predicted, and whose B half of it."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    plan = pipegraph.plan(pipegraph.capture(model, (torch.randn(8, 64),)), stages=2, balance="time")
    predicted = msgspec.to_builtins(plan.prediction)
    stages = {}
    for index, costs in enumerate(predicted["costs"]):
        stages[f"F {index}"] = 2 * costs["forward"]
        stages[f"B {index}"] = (costs["input_grad"] + costs["weight_grad"]) / 2
    return {"steps": [2 * predicted["value"]], "predicted": {"time": predicted}, "stages": stages}


def test_errors_are_parts_of_what_was_measured(cut: dict[str, Any]) -> None:
    single, stage_errors, steps = _errors([cut], "time")
    assert single == pytest.approx([0.5, 1.0] * 2)
    assert len(stage_errors) == 2 and all(0 <= error < 1 for error in stage_errors)
    assert steps == pytest.approx([0.5])
    assert _errors([cut], "measured") == ([], [], [])


def test_a_step_is_shown_with_its_error(cut: dict[str, Any]) -> None:
    assert _predicted_step(cut, "time").endswith("(-50.0%)")
    assert _predicted_step(cut, "measured") == "—"
