"""Memory that F, I, W and B need while they run, compared with the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pipegraph
from pipegraph import Pipeline
from pipegraph.cost.model_output import default_loss
from pipegraph.schedule import Kind, build
from tests.workflows.allocations import Allocations
from tests.workflows.test_recompute_memory import INPUT, MIXED, Layered


@pytest.mark.parametrize(
    ("recompute", "schedule"), [("none", "zb-h1"), ({"layers.*": "block"}, "1f1b"), (MIXED, "zb-h1")]
)
def test_stages_need_what_was_predicted(recompute: Any, schedule: str, tmp_path: Path) -> None:
    captured = pipegraph.capture(Layered(), (INPUT,))
    plan = pipegraph.plan(captured, points=["layers.4"], recompute=recompute, balance="time")
    package = pipegraph.write_package(plan, tmp_path / "package")
    pipe = Pipeline(
        package, build(schedule, 2, 1), kernels="eager", loss_fn=lambda output, target: default_loss(output)
    )
    pipe.step(INPUT, target=torch.empty(16))  # traces, and makes the gradients that others are added to
    allocations = Allocations()
    with pipe.observe(allocations), allocations:
        pipe.step(INPUT, target=torch.empty(16))
    for (index, kind), rise in allocations.rises.items():
        if kind.is_transfer:
            continue
        cost = package.manifest.stages[index].cost
        assert cost.saved_bytes is not None and cost.weight_saved_bytes is not None and cost.transient_bytes is not None
        transient = dict(zip((Kind.F, Kind.I, Kind.W, Kind.B), cost.transient_bytes, strict=True))
        saved, read_by_w, gradients = cost.saved_bytes, cost.weight_saved_bytes, cost.added_bytes or 0
        at_start, at_end = {
            Kind.F: (INPUT.shape[0] * 32 * 4 if index else 0, saved),  # what was received is saved
            Kind.I: (saved, read_by_w if index else saved),
            Kind.W: (read_by_w, gradients),
            Kind.B: (saved, gradients),
        }[kind]
        assert max(at_start, at_end) + transient[kind] == pytest.approx(at_start + rise, rel=0.05), (index, kind)
