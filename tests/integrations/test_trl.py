"""trl's SFTTrainer with a pipeline: losses and gradient norms are those of the plain one. Runs where trl is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

import pipegraph
from pipegraph.integrations.transformers import PipelineTrainer, causal_lm_loss, count_causal_lm_labels
from tests.integrations import example_scripts

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

example = example_scripts.load("trainer")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

TOKENS = example.CONFIG.vocab_size


class PipelineSFTTrainer(PipelineTrainer, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {f"w{token}": token for token in range(TOKENS - 2)} | {"<pad>": TOKENS - 2, "<eos>": TOKENS - 1}
    model = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")


def train(kind: Any, model: Any, out: Path, **options: Any) -> list[tuple[float, float]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (64,), generator=generator).tolist()
    rows = [torch.randint(TOKENS - 2, (length,), generator=generator).tolist() for length in lengths]
    arguments = trl.SFTConfig(
        str(out),
        max_steps=6,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        max_length=16,
        save_strategy="no",
        learning_rate=1e-3,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    data = datasets.Dataset.from_dict({"input_ids": rows})
    trainer = kind(model, arguments, train_dataset=data, processing_class=tokenizer(), **options)
    trainer.train()
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


def test_losses_are_those_of_the_plain_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # datasets hashes functions by pickling them, which fails with classes of newer versions of pyarrow.
    monkeypatch.setattr(datasets.fingerprint.Hasher, "hash", staticmethod(lambda value: os.urandom(8).hex()))
    monkeypatch.setattr(datasets.fingerprint.Hasher, "update", lambda self, value: None)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(example.CONFIG).train()
    inputs = {name: tensor for name, tensor in example.collate(example.DATA[:4]).items() if name != "labels"}
    plan = pipegraph.plan(pipegraph.capture(model, kwargs=inputs), points=["model.layers.2"])
    package = pipegraph.write_package(plan, tmp_path / "package")
    loss: dict[str, Any] = {"loss_fn": causal_lm_loss, "loss_weight": count_causal_lm_labels}
    pipe = pipegraph.Pipeline(package, "1f1b", 2, kernels="eager", **loss)
    actual = train(PipelineSFTTrainer, pipe, tmp_path / "pipeline", config=example.CONFIG)
    expected = train(trl.SFTTrainer, model, tmp_path / "plain")
    assert len(expected) == 6
    for step, numbers in enumerate(expected):
        assert actual[step] == pytest.approx(numbers, rel=1e-4), step
