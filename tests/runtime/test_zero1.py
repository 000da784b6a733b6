"""Ranks along dp_replicate divide the optimizer's state with torch's own optimizer (ZeRO-1), as a plan counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipegraph
from pipegraph.cost import ONCE
from pipegraph.planner.joint_plan.choices import Layout
from tests.runtime import ranks, zero1_ranks
from tests.workflows.test_recompute_memory import INPUT, Layered


def test_it_trains_alike_with_half_of_the_state(tmp_path: Path) -> None:
    plan = pipegraph.plan(pipegraph.capture(Layered(), (INPUT,)), ["layers.4"], balance="time")
    package = str(pipegraph.write_package(plan, tmp_path / "package").path)
    whole, divided = (ranks.run(zero1_ranks.train, 4, package, divides) for divides in (False, True))
    assert [losses for losses, _ in divided] == [losses for losses, _ in whole]
    assert plan.prediction is not None
    planned = [rank.optimizer_state for rank in plan.prediction.memory_parts for _ in range(2)]
    assert [size for _, size in whole] == planned
    factor = Layout(pp=2, dp_replicate=2, dp_shard=1, tp=1, zero1=True).factors(ONCE).optimizer
    assert [size for _, size in divided] == [pytest.approx(factor * size, rel=0.01) for size in planned]
