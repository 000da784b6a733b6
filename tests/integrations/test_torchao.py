"""Frozen weights that torchao quantizes in `parallelize_fn`, under LoRA. Runs where torchao is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import Qwen2ForCausalLM

import pipegraph
from pipegraph.integrations.transformers import causal_lm_loss, count_causal_lm_labels
from tests.integrations import example_scripts

quantization = pytest.importorskip("torchao.quantization")

example = example_scripts.load("trainer")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def quantize(stage: nn.Module) -> None:
    quantization.quantize_(
        stage,
        quantization.Int8WeightOnlyConfig(),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and not {"lora_A", "lora_B"} & {*name.split(".")},
    )


def test_it_trains_as_the_quantized_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: Any = get_peft_model(Qwen2ForCausalLM(example.CONFIG), adapter).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    batch = example.collate(example.DATA[:8])
    labels = batch.pop("labels")
    plan = pipegraph.plan(pipegraph.capture(model, kwargs=batch), points=["base_model.model.model.layers.2"])
    package = pipegraph.write_package(plan, tmp_path / "package")
    loss: dict[str, Any] = {"loss_fn": causal_lm_loss, "loss_weight": count_causal_lm_labels}
    pipe = pipegraph.Pipeline(package, "1f1b", 2, kernels="eager", parallelize_fn=quantize, **loss)
    result = pipe.step(**batch, target=labels)
    quantize(model)
    expected = causal_lm_loss(model(**batch), labels) / count_causal_lm_labels(labels)
    expected.backward()
    assert_close(result.loss, expected.detach())
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    for name, gradient in gradients.items():
        assert_close(gradient, model.get_parameter(name).grad, msg=name)
