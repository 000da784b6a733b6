"""`PipelineTrainer` trains as transformers' Trainer does, in any number of processes, and resumes in another number."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM, Trainer, TrainingArguments

import pipegraph
from pipegraph import BatchError, Pipeline
from pipegraph.errors import ArgumentError
from pipegraph.integrations.transformers import PipelineTrainer, causal_lm_loss, count_causal_lm_labels

EXAMPLE = Path(__file__).parents[2] / "examples/integrations/trainer.py"
FIGURES = ("loss", "grad_norm", "learning_rate", "eval_loss")


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trainer_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The history and the weights of the plain Trainer."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(example.CONFIG)
    arguments = example.arguments(tmp_path_factory.mktemp("plain"), rows=4)
    data = {"train_dataset": example.DATA[:80], "eval_dataset": example.DATA[80:], "data_collator": example.collate}
    trainer = Trainer(model, arguments, **data)
    trainer.train()
    return trainer.state.log_history, model.state_dict()


def command(ranks: int, out: Path) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *torchrun, str(EXAMPLE), str(out)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[2])}


def history(out: Path) -> list[dict[str, float]]:
    newest = max((out / "runs").glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    logs: list[dict[str, float]] = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return logs


def assert_same(logs: list[dict[str, float]], expected_logs: list[dict[str, float]]) -> None:
    for name in FIGURES:
        curve = {log["step"]: log[name] for log in logs if name in log}
        expected_curve = {log["step"]: log[name] for log in expected_logs if name in log}
        assert curve == pytest.approx(expected_curve, rel=1e-5 if name != "grad_norm" else 1e-4), name


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.timeout(400)
def test_fifty_steps_are_those_of_the_plain_trainer(ranks: int, expected: Any, tmp_path: Path) -> None:
    done = subprocess.run(command(ranks, tmp_path), env=environment(), capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr
    logs, weights = expected
    assert_same(history(tmp_path), logs)
    assert max(log["step"] for log in history(tmp_path)) == 50
    trained = Qwen2ForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    assert trained.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.timeout(400)
def test_a_killed_run_resumes_in_another_number_of_processes(expected: Any, tmp_path: Path) -> None:
    killed = subprocess.Popen(command(2, tmp_path), env=environment(), start_new_session=True)
    deadline = time.monotonic() + 200
    while not (tmp_path / "runs/checkpoint-20/trainer_state.json").exists() and time.monotonic() < deadline:
        assert killed.poll() is None, "it ends before its first checkpoint"
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    done = subprocess.run(command(1, tmp_path), env=environment(), capture_output=True, text=True, timeout=190)
    assert done.returncode == 0, done.stderr
    assert_same(history(tmp_path), expected[0])


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return example.pipeline(tmp_path_factory.mktemp("example") / "package")


@pytest.mark.parametrize(
    ("argument", "value", "advice"),
    [
        ("bf16", True, "precision="),
        ("activation_checkpointing", True, "recompute="),
        ("label_smoothing_factor", 0.1, "loss_fn"),
        ("torch_compile", True, "kernels="),
    ],
)
def test_what_the_pipeline_decides_is_refused(
    argument: str, value: Any, advice: str, pipe: Pipeline, tmp_path: Path
) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **{argument: value})
    with pytest.raises(ArgumentError) as caught:
        PipelineTrainer(pipe, arguments)
    assert advice in caught.value.advice


def test_a_model_that_is_no_pipeline_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        PipelineTrainer(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    assert "Trainer" in caught.value.advice


def test_padding_without_a_mask_is_refused(tmp_path: Path) -> None:
    """The package takes no attention_mask: padding would be read as text."""
    batch = example.collate(example.DATA[:4])
    captured = pipegraph.capture(Qwen2ForCausalLM(example.CONFIG), kwargs={"input_ids": batch["input_ids"]})
    pipegraph.write_package(pipegraph.plan(captured, points=["model.layers.2"]), tmp_path / "package")
    pipe = Pipeline(
        tmp_path / "package", "1f1b", 2, causal_lm_loss, loss_weight=count_causal_lm_labels, kernels="eager"
    )
    arguments = example.arguments(tmp_path / "runs", rows=4, steps=2)
    trainer = PipelineTrainer(
        pipe, arguments, train_dataset=example.DATA, eval_dataset=example.DATA, data_collator=example.collate
    )
    with pytest.raises(BatchError) as caught:
        trainer.train()
    assert "attention_mask" in caught.value.advice
