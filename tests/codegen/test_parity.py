"""Every model of tests/models and examples, cut in several places: outputs, gradients and buffers are the model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegraph.graph.sources import load
from tests.codegen.parity import ROOT, differences, split
from tests.slow import cases

CUTS = [
    ("tests/models/chain.py", 5),
    ("tests/models/chain.py", "layers.1.1,layers.3.0:end"),
    ("tests/models/batch_norm.py", 3),
    ("tests/models/batch_norm.py", "layers.1.1,layers.2.2"),
    ("tests/models/buffers.py", 3),
    ("tests/models/custom_functions.py", "1.classify,3"),
    ("tests/models/tensor_hooks.py", "1.blocks.0.down,3"),
    ("tests/models/dropout.py", "layers.1.2,layers.3"),
    ("tests/models/hostile_names.py", 3),
    ("tests/models/late_input.py", "layers.2,gate"),
    ("tests/models/late_input.py", "layers.1,layers.3,head"),
    ("tests/models/llama.py", 3),
    ("tests/models/llama.py", "model.layers.1.mlp"),
    ("tests/models/masked.py", 4),
    ("tests/models/nested_values.py", "layers.0,layers.2,head"),
    ("tests/models/rotary.py", 3),
    ("tests/models/rotary.py", "layers.1.attention.out,layers.4.mlp.1"),
    ("tests/models/skipping.py", "middle,late,norm"),
    ("tests/models/t5.py", 4),
    ("tests/models/t5.py", "t5.encoder.block.1.layer.1,t5.decoder.block.0,t5.lm_head"),
    ("tests/models/mixture_of_experts.py", "layers.1.feed_forward,layers.3"),
    ("tests/models/vision_transformer.py", "blocks.1.attn,blocks.3.mlp"),
    ("examples/transformer.py:build_tiny_model", "layers.2,layers.4.linear1,layers.7:end"),
    ("examples/unet.py", 4),
    ("examples/unet.py", "down.1.3,bottom,up.0.convolution,up.2"),
    ("hf:examples/llama", "model.layers.3,model.layers.6.self_attn.o_proj"),
]


# The longest ones, whose models other tests split as well.
SLOW = (
    ("tests/models/rotary.py", 3),
    ("examples/unet.py", 4),
    ("tests/models/rotary.py", "layers.1.attention.out,layers.4.mlp.1"),
    ("tests/models/llama.py", "model.layers.1.mlp"),
    ("tests/models/mixture_of_experts.py", "layers.1.feed_forward,layers.3"),
    ("tests/models/vision_transformer.py", "blocks.1.attn,blocks.3.mlp"),
    ("tests/models/llama.py", 3),
    ("tests/models/skipping.py", "middle,late,norm"),
    ("tests/models/t5.py", 4),
    ("tests/models/t5.py", "t5.encoder.block.1.layer.1,t5.decoder.block.0,t5.lm_head"),
    ("examples/transformer.py:build_tiny_model", "layers.2,layers.4.linear1,layers.7:end"),
    ("hf:examples/llama", "model.layers.3,model.layers.6.self_attn.o_proj"),
)


@pytest.mark.parametrize(("model", "cut"), cases(CUTS, slow=SLOW))
def test_stages_equal_the_model(model: str, cut: str | int, tmp_path: Path) -> None:
    """A training step; dropout draws the same numbers, as the stages run in the model's order."""
    hf = model.startswith("hf:")
    source = load(f"hf:{ROOT / model[3:]}", batch=2, seq=8) if hf else load(str(ROOT / model))
    args = tuple(arg[:2, :16] for arg in source.args) if "examples/transformer" in model else source.args
    package = split(tmp_path, source.model, args, source.kwargs, cut)
    assert differences(package, source.model, args, source.kwargs, train=True) == []


def test_every_model_is_compared() -> None:
    compared = {Path(model.partition(":")[0]).name for model, _ in CUTS if not model.startswith("hf:")}
    files = [*(ROOT / "tests/models").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    assert {file.name for file in files} - {"__init__.py", "data_dependent.py", "counting.py"} == compared
