"""Packages without weights of Hugging Face models start as transformers starts them, however they are cut."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.graph.sources import load
from pipegraph.runtime.pipeline import Pipeline
from tests.slow import cases

transformers = pytest.importorskip("transformers")

_SMALL: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**_SMALL, "intermediate_size": 128, "num_key_value_heads": 2},
    "GPT2LMHeadModel": {"vocab_size": 512, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "BertForMaskedLM": {**_SMALL, "intermediate_size": 128, "max_position_embeddings": 64},
    "T5ForConditionalGeneration": {
        "vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4
    },
    "MixtralForCausalLM": {
        **_SMALL, "num_hidden_layers": 2, "intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 2
    },
}  # fmt: skip


# transformers initialises it by the same functions as the others.
SLOW = ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration")


@pytest.mark.parametrize("name", cases(MODELS, slow=SLOW))
def test_every_split_starts_as_the_model(name: str, tmp_path: Path) -> None:
    config = getattr(transformers, name).config_class(architectures=[name], **MODELS[name])
    config.save_pretrained(tmp_path)
    source = load(f"hf:{tmp_path}", weights=False, batch=2, seq=8)
    captured = pipegraph.capture(source.model, source.args, source.kwargs)
    parameters = {}
    for stages in (1, 2, 4):
        plan = pipegraph.plan(captured, stages=stages, balance="uniform")
        package = pipegraph.write_package(plan, tmp_path / str(stages), weights=False, source=source)
        parameters[stages] = started(package.path)
    assert {*parameters[1]} == {*parameters[2]} == {*parameters[4]}
    for fqn, values in parameters[1].items():
        assert torch.equal(values, parameters[2][fqn]) and torch.equal(values, parameters[4][fqn]), fqn
    model = load(f"hf:{tmp_path}", batch=2, seq=8).model
    for fqn, parameter in model.named_parameters():
        check_distribution(fqn, parameters[4][fqn], parameter.detach())
    norms = [path for path, module in model.named_modules() if "norm" in type(module).__name__.lower()]
    assert norms and all(parameters[4][f"{norm}.weight"].eq(1).all() for norm in norms)
    reseeded = started(tmp_path / "2", seed=1)
    random = {key for key, values in parameters[2].items() if values.unique().numel() > 1}
    assert {key for key, values in parameters[2].items() if not torch.equal(values, reseeded[key])} == random


def started(package: Path, seed: int | None = None) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there are no weights
        pipe = Pipeline(package, "gpipe", kernels="autograd", loss_fn=nn.MSELoss(), seed=seed)
    return {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}


def check_distribution(name: str, actual: Tensor, expected: Tensor) -> None:
    """Compare the numbers of two draws: exactly if they are all one number, else by mean and standard deviation."""
    if expected.unique().numel() == 1:
        assert torch.equal(actual, expected), name
        return
    error = 1 / math.sqrt(actual.numel())
    deviation = expected.std().item()
    assert actual.std().item() == pytest.approx(deviation, rel=max(0.05, 4 * error)), name
    assert abs(actual.mean().item() - expected.mean().item()) < 6 * error * deviation, name
