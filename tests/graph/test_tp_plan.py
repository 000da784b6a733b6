"""The plan of tensor parallelism that a package has of its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pipegraph
from pipegraph.errors import SourceError
from pipegraph.graph.sources import load
from tests.messages import refused

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

example_inputs = (torch.ones(2, 4),)
"""


def test_a_model_file_has_it(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(f'{MODEL}\ntp_plan = {{"0": "colwise", "1": "rowwise"}}\n')
    source = load(str(file), weights=False)
    captured = pipegraph.capture(source.model, source.args)
    package = pipegraph.write_package(
        pipegraph.plan(captured, points=["1"]), tmp_path / "package", weights=False, source=source
    )
    assert package.manifest.tp_plan == {"0": "colwise", "1": "rowwise"}
    file.write_text(f'{MODEL}\ntp_plan = ["colwise"]\n')
    with refused(SourceError, "tp_plan", "['colwise']", advice='"colwise"'):
        load(str(file), weights=False)


def test_a_model_of_transformers_has_it() -> None:
    transformers = pytest.importorskip("transformers")
    from pipegraph.graph.sources.huggingface import tp_plan_of

    config = transformers.LlamaConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=8,
        vocab_size=8,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    plan = tp_plan_of(model)
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert tp_plan_of(torch.nn.Linear(1, 1)) == {}
