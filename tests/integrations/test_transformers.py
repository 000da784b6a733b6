"""`PipelineTrainer` trains as transformers' Trainer does, in any number of processes, and resumes in another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2ForCausalLM, Trainer, TrainingArguments

import pipegraph
from pipegraph import BatchError, Pipeline
from pipegraph.errors import ArgumentError
from pipegraph.integrations.transformers import PipelineTrainer, causal_lm_loss, count_causal_lm_labels
from tests.integrations import example_scripts, save_ranks
from tests.runtime import ranks

example = example_scripts.load("trainer")


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


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.timeout(300)
def test_fifty_steps_are_those_of_the_plain_trainer(ranks: int, expected: Any, tmp_path: Path) -> None:
    example_scripts.run("trainer", ranks, tmp_path)
    logs, weights = expected
    example_scripts.assert_same(example_scripts.history(tmp_path), logs)
    assert max(log["step"] for log in example_scripts.history(tmp_path)) == 50
    trained = Qwen2ForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    assert trained.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.timeout(500)
def test_a_killed_run_resumes_in_another_number_of_processes(expected: Any, tmp_path: Path) -> None:
    example_scripts.run_killed("trainer", 2, tmp_path, tmp_path / "runs/checkpoint-20/trainer_state.json")
    example_scripts.run("trainer", 1, tmp_path)
    example_scripts.assert_same(example_scripts.history(tmp_path), expected[0])


class Classifier(torch.nn.Module):
    """Returns its loss if it is given labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.second(self.first(features).tanh())
        return logits if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def test_a_mean_over_rows_is_accumulated_and_the_best_model_is_loaded(tmp_path: Path) -> None:
    """Without loss_weight the loss of accumulated batches is their mean, as that of a model without token counts."""
    torch.manual_seed(0)
    model = Classifier()
    features, labels = torch.randn(40, 6), torch.randint(3, (40,))
    data = [{"features": row, "labels": label} for row, label in zip(features, labels, strict=True)]
    plan = pipegraph.plan(pipegraph.capture(model, (features[:4],)), points=["second"])
    pipegraph.write_package(plan, tmp_path / "package")
    pipe = Pipeline(tmp_path / "package", "1f1b", 2, cross_entropy, kernels="eager")

    def accuracy(predicted: Any) -> dict[str, float]:
        return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    trainers = []
    for kind, trained in ((Trainer, model), (PipelineTrainer, pipe)):
        arguments = TrainingArguments(
            str(tmp_path / kind.__name__),
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=0.1,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainers.append(
            kind(trained, arguments, train_dataset=data[:32], eval_dataset=data[32:], compute_metrics=accuracy)
        )
        trainers[-1].train()
    plain, pipelined = trainers
    example_scripts.assert_same(pipelined.state.log_history, plain.state.log_history)
    accuracies = (
        [log["eval_accuracy"] for log in kind.state.log_history if "eval_accuracy" in log] for kind in trainers
    )
    assert next(accuracies) == next(accuracies)
    assert pipelined.state.best_global_step == plain.state.best_global_step
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, dict(model.named_parameters())[name], rtol=1e-4, atol=1e-6)


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


def test_an_input_that_the_package_does_not_take_is_refused(pipe: Pipeline, tmp_path: Path) -> None:
    def collate(rows: Any) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = example.collate(rows)
        return {**batch, "position_ids": torch.zeros_like(batch["input_ids"])}

    arguments = example.arguments(tmp_path / "runs", rows=4, steps=2)
    trainer = PipelineTrainer(
        pipe,
        arguments,
        train_dataset=example.DATA,
        eval_dataset=example.DATA,
        data_collator=collate,
        config=example.CONFIG,
    )
    with pytest.raises(BatchError) as caught:
        trainer.train()
    assert "position_ids" in caught.value.problem
    assert "data_collator" in caught.value.advice


def test_an_error_of_the_first_rank_is_that_of_all(pipe: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    results = ranks.run(save_ranks.save, 2, str(pipe.package.path), str(tmp_path / "saved"))
    for text, names in results:
        assert "No space left" in text
        assert names == []
