"""Padded batches of Hugging Face models: loss, gradients and evaluation equal the unsplit model on the whole batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.graph.capture import capture_source
from pipegraph.graph.sources import load
from tests.slow import cases

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
GROUPED = COMMON | {"num_key_value_heads": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", "model.layers.1", GROUPED),
    "Qwen2ForCausalLM": ("qwen2", "model.layers.1", GROUPED),
    "Qwen3ForCausalLM": ("qwen3", "model.layers.1", GROUPED | {"head_dim": 8}),
    "MistralForCausalLM": ("mistral", "model.layers.1", GROUPED | {"sliding_window": 4}),
    "Gemma2ForCausalLM": ("gemma2", "model.layers.1", GROUPED | {"head_dim": 8, "sliding_window": 4}),
    "BertForMaskedLM": ("bert", "bert.encoder.layer.1", COMMON | NO_DROPOUT),
    "RobertaForMaskedLM": ("roberta", "roberta.encoder.layer.1", COMMON | NO_DROPOUT),
    "GPT2LMHeadModel": (
        "gpt2",
        "transformer.h.1",
        {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "n_inner": 24}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "OPTForCausalLM": (
        "opt",
        "model.decoder.layers.1",
        {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"max_position_embeddings": 32, "word_embed_proj_dim": 16, "dropout": 0.0},
    ),
    "BloomForCausalLM": (
        "bloom",
        "transformer.h.1",
        {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0},
    ),
    "T5ForConditionalGeneration": (
        "t5",
        "decoder.block.1",
        {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0},
    ),
}
"""Class → its configuration's type, its split point, and the fields of the configuration."""

SLOW = [name for name in MODELS if name not in ("LlamaForCausalLM", "BertForMaskedLM")]


def folder_of(name: str, folder: Path) -> Path:
    kind, _, fields = MODELS[name]
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [name]} | fields))
    return folder


def loss_fn(output: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten(), reduction="sum")


def count(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def inputs(name: str, rows: int, side: str = "") -> dict[str, Any]:
    """Tokens and a mask, which is padded at one side of some rows."""
    generator = torch.Generator().manual_seed(rows)
    batch: dict[str, Any] = {}
    for prefix in ("", "decoder_") if name.startswith("T5") else ("",):
        mask = torch.ones(rows, 10, dtype=torch.long)
        for row, padding in enumerate([0, 4, 7, 2][:rows] if side else []):
            mask[row, 10 - padding :] = 0
        batch[f"{prefix}input_ids"] = torch.randint(2, 64, (rows, 10), generator=generator)
        batch[f"{prefix}attention_mask"] = mask.flip(1) if side == "left" else mask
    return batch


@cache
def model_of(name: str) -> nn.Module:
    kind, _, fields = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **fields, use_cache=False)
    return getattr(transformers, name)(config)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Packages by model, captured with a mask of ones."""

    @cache
    def package(name: str) -> pipegraph.Package:
        captured = pipegraph.capture(model_of(name), kwargs=inputs(name, 2))
        plan = pipegraph.plan(captured, points=[MODELS[name][1]])
        return pipegraph.write_package(plan, tmp_path_factory.mktemp(name) / "out")

    return package


def pipeline(package: pipegraph.Package, microbatches: int) -> pipegraph.Pipeline:
    return pipegraph.Pipeline(package, "1f1b", microbatches, loss_fn=loss_fn, loss_weight=count, kernels="eager")


def check_parity(model: nn.Module, pipe: pipegraph.Pipeline, batch: dict[str, Any]) -> None:
    labels_of = "decoder_" if "decoder_input_ids" in batch else ""
    is_token = batch[f"{labels_of}attention_mask"].bool()
    labels = torch.where(is_token, batch[f"{labels_of}input_ids"], -100)
    model.train()
    model.zero_grad()
    expected_loss = loss_fn(model(**batch), labels) / count(labels)
    expected_loss.backward()
    pipe.train()
    pipe.zero_grad()
    result = pipe.step(**batch, target=labels)
    torch.testing.assert_close(result.loss, expected_loss.detach(), rtol=1e-4, atol=1e-5)
    gradients = {
        name: parameter.grad
        for stage in pipe.stages.values()
        for name, parameter in stage.named_parameters(remove_duplicate=False)
    }
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5), name
    pipe.eval()
    model.eval()
    with torch.no_grad():
        expected = model(**batch)["logits"]
    torch.testing.assert_close(pipe.eval(**batch)["logits"][is_token], expected[is_token], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", cases(list(MODELS), slow=SLOW))
def test_padded_batches(name: str, packages: Any) -> None:
    package = packages(name)
    assert package.manifest.batch.mixing == ()
    pipe = pipeline(package, 2)
    for side in ("right", "left"):
        check_parity(model_of(name), pipe, inputs(name, 4, side))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_other_numbers_of_microbatches(name: str, packages: Any) -> None:
    for side, microbatches in (("right", 1), ("left", 4)):
        check_parity(model_of(name), pipeline(packages(name), microbatches), inputs(name, 4, side))


@pytest.mark.parametrize("name", cases(list(MODELS), slow=[name for name in MODELS if name != "LlamaForCausalLM"]))
def test_padded_batches_of_a_configuration(name: str, tmp_path: Path) -> None:
    source = load(f"hf:{folder_of(name, tmp_path)}", batch=1, seq=10, attention_mask=True)
    plan = pipegraph.plan(capture_source(source), points=[MODELS[name][1]])
    package = pipegraph.write_package(plan, tmp_path / "out")
    for microbatches in (1, 4):
        check_parity(source.model, pipeline(package, microbatches), inputs(name, 4, "right"))
