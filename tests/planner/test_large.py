"""The largest open models, with fewer of their layers: priced as a GPU runs them, and planned in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pipegraph
from benchmarks.planner_scale import DEEPSEEK_V3, LLAMA_405B
from pipegraph.cost import SegmentCost
from pipegraph.cost.hardware import Hardware
from pipegraph.graph.sources import load
from pipegraph.planner import solve
from pipegraph.planner.plan import Plan
from tests.speed import timed

TOKENS = 4096


def planned(folder: Path, config: dict[str, Any], stages: int, recompute: str = "none") -> Plan:
    """Without a warning, which would be an error here: every operation is counted, every backward is traced."""
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    source = load(f"hf:{file}", weights=False, batch=1, seq=TOKENS)
    captured = pipegraph.capture(source.model, source.args, source.kwargs)
    return pipegraph.plan(captured, stages=stages, hardware=Hardware.load("h100"), recompute=recompute, microbatches=16)


@pytest.mark.slow
def test_a_llama_of_405b(tmp_path: Path) -> None:
    plan, loops = timed(lambda: planned(tmp_path, LLAMA_405B | {"num_hidden_layers": 8}, stages=4))
    assert loops < 200  # 60 on an idle machine
    assert plan.priced is not None and plan.prediction is not None
    assert len(plan.priced.costs) > 2 * 8 + 1  # layers can be cut inside
    embedding, *_, head = plan.priced.costs
    table = LLAMA_405B["vocab_size"] * LLAMA_405B["hidden_size"] * 2
    # A microbatch has its indices kept, not the zeros that the gradient of the table is added up in.
    assert embedding.saved_bytes < table / 1000
    width, inner, keys = (LLAMA_405B[name] for name in ("hidden_size", "intermediate_size", "num_key_value_heads"))
    layer = 2 * width * width + 2 * width * width * keys // LLAMA_405B["num_attention_heads"] + 3 * width * inner
    products = 2 * TOKENS * (8 * layer + width * LLAMA_405B["vocab_size"])
    attention = 8 * 4 * TOKENS * TOKENS * width
    assert sum(cost.flops for cost in plan.priced.costs) == pytest.approx(products + attention, rel=1e-3)
    assert head.parameter_bytes == pytest.approx(table, rel=1e-3)
    first, *_, last = plan.prediction.stages
    assert first.input_grad == 0 and last.total == pytest.approx(first.total, rel=0.3)


@pytest.mark.slow
def test_deepseek_v3(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    plan = planned(tmp_path, DEEPSEEK_V3 | layers, stages=3)
    assert plan.priced is not None
    experts = max(plan.priced.costs, key=lambda cost: cost.parameter_bytes)
    width, inner, count = (DEEPSEEK_V3[name] for name in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    routed = 3 * width * inner  # parameters of one expert
    assert experts.parameter_bytes == pytest.approx(2 * (count + 1) * routed, rel=0.01)
    active = DEEPSEEK_V3["num_experts_per_tok"] + DEEPSEEK_V3["n_shared_experts"]
    assert experts.flops == pytest.approx(2 * TOKENS * (active * routed + count * width), rel=1e-3)
    # The gradients of the experts' weights can be put off, as those of every product of matrices can.
    assert experts.weight_grad == pytest.approx(experts.forward, rel=0.25)
    assert experts.input_grad == pytest.approx(experts.forward, rel=0.25)


def test_126_layers_that_can_be_cut_inside_are_planned_for_16_ranks_in_seconds() -> None:
    attention = [(0.010, 1.3, 0.6), (0.002, 1.0, 1.0)]
    layer = [SegmentCost(f, f * i, f * w, 2**27, 2**30, 2**29) for f, i, w in (*attention, (0.026, 1.0, 1.0))]
    chain = [SegmentCost(0.001, 0, 0.01, 2**27, 0, 2**32), *layer * 126, SegmentCost(0.024, 0.024, 0.023, 0, 2**30)]
    solution, loops = timed(lambda: solve(chain, 16, "1f1b", 64, link=(1e-5, 4e11)))
    assert loops < 100  # 15 on an idle machine
    assert solution.gap < 0.01
    stages = [*solution.cuts, len(chain)]
    assert stages[-1] - stages[-2] < 3 * 126 / 16  # the head is worth two thirds of a layer
