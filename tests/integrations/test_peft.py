"""Adapters of PEFT in a pipeline: trained on the base model's checkpoint, killed, resumed, and read by PEFT."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import Qwen2ForCausalLM, Trainer

import pipegraph
from pipegraph import Pipeline
from pipegraph.errors import ArgumentError, PackageError
from pipegraph.integrations.peft import save_adapter
from pipegraph.integrations.transformers import PipelineTrainer
from pipegraph.package import Package
from pipegraph.workflows.export import export
from tests.cli.command import ROOT
from tests.integrations import example_scripts

trainer_example, example = example_scripts.load("trainer"), example_scripts.load("lora")


# PEFT asks transformers for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the base model, and of the package of its adapted form."""
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    Qwen2ForCausalLM(example.CONFIG).save_pretrained(folder / "base")
    example.split(folder / "package")
    return folder


def pipeline(folder: Path, **options: Any) -> Pipeline:
    return Pipeline(folder / "package", "1f1b", 2, weights=folder / "base", kernels="eager", seed=3, **options)


def plain_model(folder: Path) -> PeftModel:
    """The adapted model in one process, with the first adapter of the pipeline."""
    model = get_peft_model(Qwen2ForCausalLM.from_pretrained(folder / "base"), example.ADAPTER)
    adapters = {name: tensor for name, tensor in pipeline(folder).state_dict().items() if "lora_" in name}
    assert model.load_state_dict(adapters, strict=False).unexpected_keys == []
    return model


def test_the_base_model_is_read_and_adapters_start_as_peft_starts_them(base: Path) -> None:
    pipe, expected = pipeline(base), Qwen2ForCausalLM.from_pretrained(base / "base")
    batch = trainer_example.collate(trainer_example.DATA[:4])
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    outputs = pipe.eval(**inputs)
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    torch.testing.assert_close(logits, expected(**inputs).logits, rtol=1e-5, atol=1e-6)
    trained = [name for name, parameter in pipe.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert all(not tensor.any() for name, tensor in pipe.state_dict().items() if "lora_B" in name)
    assert all(tensor.any() for name, tensor in pipe.state_dict().items() if "lora_A" in name)


@pytest.mark.timeout(500)
def test_two_processes_are_killed_and_resumed_as_the_plain_trainer_continues(base: Path, tmp_path: Path) -> None:
    model = plain_model(base)
    data = {"train_dataset": example.DATA[:80], "eval_dataset": example.DATA[80:], "data_collator": example.collate}
    trainer = Trainer(model, trainer_example.arguments(tmp_path / "plain", rows=4, steps=40), **data)
    trainer.train()
    out = tmp_path / "pipeline"
    example_scripts.run_killed("lora", 2, out, out / "runs/checkpoint-20/trainer_state.json")
    example_scripts.run("lora", 2, out)
    example_scripts.assert_same(example_scripts.history(out), trainer.state.log_history)
    model.save_pretrained(tmp_path / "expected")
    tensors, expected = (
        load_file(folder / "adapter_model.safetensors") for folder in (out / "adapter", tmp_path / "expected")
    )
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    assert json.loads((out / "adapter/adapter_config.json").read_text())["peft_type"] == "LORA"
    saved = {file.name for file in (out / "runs/checkpoint-20").iterdir()}
    assert not any(name.startswith("model") for name in saved)  # the base model is not stored again
    batch = trainer_example.collate(trainer_example.DATA[80:84])
    adapted = PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained(base / "base"), out / "adapter").eval()
    merged = Qwen2ForCausalLM.from_pretrained(out / "merged").eval()
    torch.testing.assert_close(merged(**batch).logits, adapted(**batch).logits, rtol=1e-4, atol=1e-5)


def test_a_module_that_is_trained_as_a_whole_starts_from_the_base_model(base: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["lm_head"])
    expected = Qwen2ForCausalLM.from_pretrained(base / "base")
    model = get_peft_model(Qwen2ForCausalLM(example.CONFIG), config)
    batch = trainer_example.collate(trainer_example.DATA[:4])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    plan = pipegraph.plan(pipegraph.capture(model, kwargs=inputs), points=["base_model.model.model.layers.1"])
    pipegraph.write_package(plan, tmp_path / "package")

    def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    pipe = Pipeline(tmp_path / "package", "1f1b", 2, loss, weights=base / "base", kernels="eager")
    result = pipe.step(**inputs, target=batch["input_ids"], return_outputs=True)
    logits = result.outputs["logits"] if isinstance(result.outputs, dict) else result.outputs
    torch.testing.assert_close(logits, expected(**inputs).logits, rtol=1e-5, atol=1e-6)
    save_adapter(pipe, tmp_path / "adapter", config)
    adapted = PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained(base / "base"), tmp_path / "adapter")
    torch.testing.assert_close(adapted(**inputs).logits, logits, rtol=1e-5, atol=1e-6)


def test_a_name_that_no_adapter_has_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(PackageError) as caught:
        save_adapter(pipeline(base), tmp_path / "adapter", example.ADAPTER, adapter="other")
    assert "get_peft_model" in caught.value.advice
    assert not (tmp_path / "adapter").exists()


def test_the_trainer_asks_for_the_configuration_of_adapters(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        PipelineTrainer(pipeline(base), trainer_example.arguments(tmp_path, rows=4), config=example.CONFIG)
    assert "peft_config=" in caught.value.advice


def test_export_of_a_whole_checkpoint_names_what_exports_adapters(base: Path, tmp_path: Path) -> None:
    pipe = pipeline(base)
    pipe.save(tmp_path / "checkpoints", step=1)
    with pytest.raises(PackageError) as caught:
        export(tmp_path / "checkpoints", Package.open(base / "package"), tmp_path / "out")
    assert "save_adapter" in caught.value.advice


LARGE = """
import resource, sys, torch, pipegraph
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
config = LlamaConfig(**sizes, num_attention_heads=64, num_key_value_heads=8, use_cache=False)
with init_empty_weights(include_buffers=False):
    adapter = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapter)
captured = pipegraph.capture(model, kwargs={"input_ids": torch.ones(1, 4096, dtype=torch.long)})
pipegraph.write_package(pipegraph.plan(captured, stages=8, balance="uniform"), sys.argv[1], weights=False)
print(sum(parameter.numel() for parameter in model.parameters()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_70_billion_parameters_is_split_without_its_weights(tmp_path: Path) -> None:
    script = [sys.executable, "-c", LARGE, str(tmp_path / "package")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=580, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    parameters, kibibytes = map(int, done.stdout.split())
    assert parameters > 70e9
    assert kibibytes < 1.5 * 2**20
    assert len(Package.open(tmp_path / "package").manifest.stages) == 8
