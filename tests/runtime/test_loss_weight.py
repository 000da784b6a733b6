"""A loss over what counts: its sum over microbatches, ranks and accumulated steps, divided by all items that count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from pipegraph.errors import ArgumentError, BatchError
from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from tests.messages import refused
from tests.runtime import meshes, ranks
from tests.runtime.packages import Reference, write

IGNORED = -100


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum over tokens that count, and how many of them are right."""
    right = (output.argmax(-1) == target).sum()
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), {"right": right}


def counted(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def tokens_and_labels(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels of which half is masked at random, and all of the first two rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(meshes.WORDS, (rows, meshes.LENGTH), generator=generator)
    labels = tokens.flip(0).masked_fill(torch.rand(tokens.shape, generator=generator) < 0.5, IGNORED)
    labels[:2] = IGNORED
    labels[2:, 0] = 1
    return tokens, labels


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}


def expected_gradients(model: Reference, pipe: Pipeline) -> dict[str, Tensor | None]:
    """Those of the unsplit model, of the parameters that this rank has."""
    return {name: model.parameters[name].grad for name, _ in pipe.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(meshes.perceptrons(2), tmp_path_factory.mktemp("perceptrons") / "package"))


def pipeline(folder: str, **options: Any) -> Pipeline:
    options = {"loss_fn": summed, "loss_weight": counted, "kernels": "eager", "microbatches": 4, **options}
    return Pipeline(Package.open(folder), options.pop("schedule", "1f1b"), **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_are_those_of_the_mean_over_what_counts(schedule: str, steps: int, folder: str) -> None:
    """One microbatch has nothing that counts; batches that are accumulated have different numbers of rows."""
    pipe, model = pipeline(folder, schedule=schedule), Reference(Package.open(folder))
    batches = [tokens_and_labels(8 + step, seed=step) for step in range(steps)]
    total = sum(int(counted(labels)) for _, labels in batches)
    for tokens, labels in batches:
        result = pipe.step(tokens, target=labels, weight=total if steps > 1 else None)
        loss, metrics = summed(model({"tokens": tokens}), labels)
        (loss / total).backward()
        assert_close(result.loss, (loss / total).detach())
        assert result.metrics is not None and result.metrics["right"] == metrics["right"] / total
    assert_close(gradients(pipe), expected_gradients(model, pipe), rtol=1e-6, atol=1e-6)
    assert all(not count.symbolic or count.static <= 2 for count in pipe.kernels_report())


def test_losses_of_several_steps_give_their_mean(folder: str) -> None:
    """Each over its own items, and two over those of both."""
    pipe, model = pipeline(folder), Reference(Package.open(folder))
    batches = [tokens_and_labels(8 + step, seed=step) for step in range(2)]
    counts = [int(counted(labels)) for _, labels in batches]
    sums = [summed(model({"tokens": tokens}), labels)[0].detach() for tokens, labels in batches]
    mean = sum(sums) / sum(counts)

    apart = [pipe.step(tokens, target=labels) for tokens, labels in batches]
    assert [step_result.weight for step_result in apart] == counts
    assert_close(sum(step_result.loss * step_result.weight for step_result in apart) / sum(counts), mean)

    together = [pipe.step(tokens, target=labels, weight=sum(counts)) for tokens, labels in batches]
    assert_close(sum(step_result.loss for step_result in together), mean)
    assert_close([step_result.loss * step_result.weight for step_result in together], sums)


def test_another_number_of_items_traces_nothing_anew(folder: str) -> None:
    pipe = pipeline(folder)
    for seed in range(4):
        tokens, labels = tokens_and_labels(8, seed)
        pipe.step(tokens, target=labels)
    assert [(count.static, count.symbolic) for count in pipe.kernels_report()] == [(1, 0)] * len(pipe.kernels_report())


def test_an_evaluation_divides_by_what_counts(folder: str) -> None:
    tokens, labels = tokens_and_labels(6, seed=0)
    loss, _ = summed(Reference(Package.open(folder))({"tokens": tokens}), labels)
    assert_close(pipeline(folder).evaluate(tokens, target=labels).loss, (loss / counted(labels)).detach())


def in_ranks(rank: int, folder: str, shape: meshes.Shape, rows: tuple[int, ...]) -> str:
    pipe, mesh = meshes.make(folder, shape, "1f1b", loss_fn=summed, loss_weight=counted)
    model, (tokens, labels) = Reference(Package.open(folder)), tokens_and_labels(sum(rows), seed=5)
    local_rows = meshes.rows_of(shape, rows, mesh)
    result = pipe.step(tokens[local_rows], target=labels[local_rows])
    loss, _ = summed(model({"tokens": tokens}), labels)
    (loss / counted(labels)).backward()
    assert_close(gradients(pipe), expected_gradients(model, pipe), rtol=1e-6, atol=1e-6)
    assert_close(result.loss, (loss / counted(labels)).detach())
    return "equal"


def test_what_counts_is_that_of_all_data_parallel_ranks(folder: str) -> None:
    """One rank has more rows, and all of the masked ones."""
    assert ranks.run(in_ranks, 4, folder, {"pp": 2, "dp_replicate": 2}, (7, 4)) == ["equal"] * 4


def test_a_batch_in_which_nothing_counts_is_refused(folder: str) -> None:
    tokens, _ = tokens_and_labels(4, seed=0)
    ignored_labels = torch.full_like(tokens, IGNORED)
    with refused(BatchError, "loss_weight", "0", advice="leave the batch out"):
        pipeline(folder).step(tokens, target=ignored_labels)
    pipe = pipeline(folder)
    assert pipe.step(tokens, target=ignored_labels, weight=3).loss == 0
    assert all(not gradient.any() for gradient in gradients(pipe).values())


@pytest.mark.parametrize("weight", [-1, float("nan"), "3", torch.ones(2)])
def test_a_weight_is_a_number_of_items(weight: Any, folder: str) -> None:
    tokens, labels = tokens_and_labels(4, seed=0)
    with refused(BatchError, "loss_weight(target)", "one number", advice="sum"):
        pipeline(folder, loss_weight=lambda target: weight).step(tokens, target=labels)
    with refused(ArgumentError, "weight cannot be", advice="a number above 0"):
        pipeline(folder).step(tokens, target=labels, weight=weight)


def test_what_does_not_fit_together_is_refused(folder: str) -> None:
    tokens, labels = tokens_and_labels(4, seed=0)
    with refused(ArgumentError, "loss_weight", 'loss_reduction="sum"', advice="one of the two"):
        pipeline(folder, loss_reduction="sum")
    with refused(ArgumentError, "loss_weight", "3", advice="loss_weight=lambda"):
        pipeline(folder, loss_weight=3)
    with refused(ArgumentError, "weight", advice="Pipeline(…, loss_weight="):
        pipeline(folder, loss_weight=None).step(tokens, target=labels, weight=4)


def test_only_the_rank_of_the_last_stage_needs_the_target(tmp_path: Path) -> None:
    """The target of a rank without the last stage is not counted: it may be left out."""
    folder = str(write(meshes.perceptrons(2), tmp_path / "package"))
    assert ranks.run(without_target, 2, folder) == ["equal"] * 2


def without_target(rank: int, folder: str) -> str:
    pipe = pipeline(folder, timeout=60)
    model, (tokens, labels) = Reference(Package.open(folder)), tokens_and_labels(6, seed=1)
    pipe.step(tokens, target=labels if rank == 1 else None)
    (summed(model({"tokens": tokens}), labels)[0] / counted(labels)).backward()
    assert_close(gradients(pipe), expected_gradients(model, pipe), rtol=1e-6, atol=1e-6)
    return "equal"
