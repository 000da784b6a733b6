"""Four ways to divide four processes: what ranks hold is what was predicted."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.joint_plan.__main__ import compare
from benchmarks.joint_plan.plans import LAYOUTS
from pipegraph.cost.hardware import Hardware


@pytest.mark.timeout(400)
def test_each_runs_and_holds_what_was_predicted() -> None:
    """The times of such small steps say nothing. `python -m benchmarks.joint_plan` compares those of a Llama."""
    plans, measured = compare("layers", Hardware.load("cpu"), "time", "eager", 64, 4, None, rounds=1)
    assert [plan.name for plan in plans] == list(LAYOUTS)
    for plan, run in zip(plans, measured, strict=True):
        per_rank = len(run.memory) // len(plan.memory)  # processes that hold the same
        peaks = [max(run.memory[per_rank * rank : per_rank * (rank + 1)]) for rank in range(len(plan.memory))]
        assert peaks == [pytest.approx(expected, rel=0.05) for expected in plan.memory], plan.name
        assert median(run.steps) > 0 and all(min(seconds) > 0 for seconds in run.seconds)
