"""The batch of `verify`: two microbatches of distinct rows, compared with the unsplit model on the whole batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import BatchError
from pipegraph.graph.sources.model_source import ModelSource, TrainingFunctions
from pipegraph.package import Package
from pipegraph.package.manifest import BatchEntry, RowOperator
from pipegraph.workflows.verify import verify
from tests.messages import refused


class Masked(nn.Module):
    """A mask of rows, which may be along any dimension of the other input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * attention_mask[..., None])


class MixesRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h - h.mean(0))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def mean_loss(output: Any, target: Any = None) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return output.square().mean() if target is None else F.mse_loss(output, target)


def source_of(
    model: nn.Module,
    *args: Tensor,
    loss_fn: Callable[..., Any] = mean_loss,
    target: Any = None,
    loss_weight: Any = None,
) -> ModelSource:
    training = TrainingFunctions(loss_weight=loss_weight)
    return ModelSource("model.py", "", model, args, {}, loss_fn, target, training=training)


def written(source: ModelSource, folder: Path, dynamic_shapes: Any = None) -> Package:
    captured = pipegraph.capture(source.model, source.args, dynamic_shapes=dynamic_shapes)
    return pipegraph.write_package(pipegraph.plan(captured, points=["last"]), folder / "out", source=source)


def edited(package: Package, change: Callable[[dict[str, Any]], None]) -> Package:
    """The package with another manifest."""
    file = package.path / "pipeline.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))
    return Package.open(package.path)


def with_batch(package: Package, batch: BatchEntry) -> Package:
    return replace(package, manifest=structs.replace(package.manifest, batch=batch))


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_unequal_microbatches_of_distinct_rows(tmp_path: Path) -> None:
    source = source_of(Masked(), data(2, 5, 8), torch.ones(2, 5, dtype=torch.long), target=data(2, 5, 3))
    comparison = verify(written(source, tmp_path), source)
    assert comparison.equal, str(comparison)
    assert "batch: 3 rows, all different, in microbatches of 2 and 1" in str(comparison).splitlines()
    assert comparison.to_dict()["microbatches"] == [2, 1] and comparison.notes == ()
    assert comparison.batch is not None and comparison.batch.whole_batch is not None
    assert comparison.batch.whole_batch.args[1].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]


def test_a_package_of_a_fixed_number_of_rows(tmp_path: Path) -> None:
    source = source_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), data(2, 8))
    captured = pipegraph.capture(source.model, source.args, dynamic_shapes=({0: None, 1: None},))
    package = pipegraph.write_package(pipegraph.plan(captured, points=["1"]), tmp_path / "out", source=source)
    assert package.manifest.sizes == {}
    comparison = verify(package, source)
    assert comparison.equal and "batch: 4 rows, all different, in microbatches of 2 and 2" in str(comparison)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_role_that_was_tampered_with(tmp_path: Path, fixed: bool) -> None:
    source = source_of(Masked(), data(2, 5, 8), torch.ones(2, 5, dtype=torch.long))
    package = written(source, tmp_path, ({0: None, 1: None}, {0: None, 1: None}) if fixed else None)
    assert verify(package, source).equal

    def change(manifest: dict[str, Any]) -> None:
        manifest["values"]["attention_mask"]["batch_dim"] = None
        manifest["values"]["attention_mask"].pop("role", None)

    with refused(BatchError, "attention_mask whole", "Masked (model.py)", advice="--batch-dim attention_mask=0"):
        verify(edited(package, change), source)


def test_a_batch_dimension_that_was_tampered_with(tmp_path: Path) -> None:
    """The rows are along dimension 1, and the manifest says 0."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.GRU(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)[0])

    source = source_of(TimeFirst(), data(6, 2, 8))
    package = written(source, tmp_path, ({0: "time", 1: "batch"},))

    def change(manifest: dict[str, Any]) -> None:
        for value in manifest["values"].values():
            value["batch_dim"] = 1

    comparison = verify(edited(package, change), source)
    assert comparison.equal and comparison.batch is not None and comparison.batch.rows == (2, 1), str(comparison)

    def change_back(manifest: dict[str, Any]) -> None:
        for value in manifest["values"].values():
            value["batch_dim"] = 0
            value["shape"] = ["batch", "time", value["shape"][-1]]

    comparison = verify(edited(package, change_back), source)
    assert not comparison.equal and "wrong role, or the model mixes rows" in comparison.hint()


def test_a_model_that_mixes_rows(tmp_path: Path) -> None:
    """It is another function of the whole batch, so that lists of microbatches alone are right."""
    source = source_of(MixesRows(), data(4, 8), target=data(4, 3))
    package = written(source, tmp_path)
    unknown = verify(with_batch(package, BatchEntry("values")), source)
    assert not unknown.equal and "for each microbatch, and not for the whole batch" in unknown.hint()
    comparison = verify(with_batch(package, BatchEntry("rules", mixing=(RowOperator("mean", "model.py:7"),))), source)
    assert comparison.equal, str(comparison)
    text = "batch: 2 microbatches, each compared with the model alone: the model mixes rows, by mean (model.py:7)"
    assert text in str(comparison).splitlines()


def test_inputs_that_are_lists(tmp_path: Path) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.last(self.first(x) + table.cumsum(0).sum())

    source = source_of(Packed(), data(4, 8), data(5))
    package = written(source, tmp_path)

    def change(manifest: dict[str, Any]) -> None:
        manifest["values"]["table"] |= {"role": "list", "batch_dim": None}

    comparison = verify(edited(package, change), source)
    assert comparison.equal and "the model alone: table is given as a list" in str(comparison), str(comparison)


@pytest.mark.parametrize("proof", ["", "rules"])
def test_batch_norm(tmp_path: Path, proof: Any) -> None:
    """In training it depends on the rows of a microbatch, and in evaluation it does not."""
    source = source_of(Normed(), data(4, 8), target=data(4, 3))
    package = written(source, tmp_path)
    norm = () if not proof else (RowOperator("batch norm", "model.py:3"),)
    comparison = verify(with_batch(package, BatchEntry(proof, per_microbatch=norm)), source)
    assert comparison.equal and comparison.training, str(comparison)
    assert len(comparison.notes) == 1 and ("batch norm (model.py:3)" in comparison.notes[0]) == bool(proof)
    assert {item.name for item in comparison.of_kind("buffer")} >= {"norm.running_mean", "norm.num_batches_tracked"}
    # If the package claims that nothing depends on the rows, training is wrong.
    assert not verify(with_batch(package, BatchEntry("rules")), source).equal


def test_a_loss_that_is_not_a_mean_over_rows(tmp_path: Path) -> None:
    """The package is right, and the loss of a batch is not that of its microbatches, with the model either."""
    source = source_of(
        Masked(),
        data(2, 5, 8),
        torch.ones(2, 5, dtype=torch.long),
        loss_fn=lambda output: output.square().sum(),
    )
    comparison = verify(written(source, tmp_path), source)
    assert comparison.equal, str(comparison)
    assert comparison.notes[0].startswith("the loss is not a mean over rows: ")


def test_loss_weight_of_the_model_file(tmp_path: Path) -> None:
    labels = torch.tensor([[0, 1, -100, 2, -100], [1, -100, -100, -100, 2]])
    source = source_of(
        Masked(),
        data(2, 5, 8),
        torch.ones(2, 5, dtype=torch.long),
        loss_fn=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"),
        target=labels,
        loss_weight=lambda target: (target >= 0).sum(),
    )
    comparison = verify(written(source, tmp_path), source)
    assert comparison.equal and comparison.notes == (), str(comparison)


def test_outputs_without_rows(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.last(self.first(x)) / self.temperature, self.temperature

    source = source_of(Scaled(), data(4, 8))
    comparison = verify(written(source, tmp_path), source)
    assert comparison.equal, str(comparison)


def test_a_loss_over_the_batch(tmp_path: Path) -> None:
    """With `loss_over` in the model file, the loss is that of the whole batch."""

    def contrastive(output: Tensor) -> Tensor:
        rows = F.normalize(output.flatten(1), dim=1)
        return F.cross_entropy(rows @ rows.t(), torch.arange(len(rows)))

    source = source_of(Masked(), data(2, 5, 8), torch.ones(2, 5, dtype=torch.long), loss_fn=contrastive)
    source = replace(source, training=TrainingFunctions(loss_over="batch"))
    comparison = verify(written(source, tmp_path), source)
    assert comparison.equal and comparison.notes == (), str(comparison)


class Captioner(nn.Module):
    """A causal decoder that returns its own loss, and takes 0 for padding, whose scores are -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.query, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(tokens)
        sees = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril() & (tokens != 0)[:, None, :]
        scores = self.query(x) @ x.transpose(1, 2)
        logits = self.head(scores.masked_fill(~sees, -torch.inf).softmax(-1) @ x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
        return {"loss": loss, "logits": logits}


def captioner(tmp_path: Path, tokens: Tensor) -> tuple[Package, ModelSource]:
    torch.manual_seed(0)
    model, kwargs = Captioner(), {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    plan = pipegraph.plan(pipegraph.capture(model, kwargs=kwargs), points=["head"])
    return pipegraph.write_package(plan, tmp_path / "out"), ModelSource("model.py", "", model, (), kwargs)


def test_rows_of_tokens_stay_padded_at_the_end(tmp_path: Path) -> None:
    """The loss is the model's, a mean over labels that differ in number, and so is that of the pipeline's outputs."""
    verification = verify(*captioner(tmp_path, torch.tensor([[4, 5, 6, 7, 8], [1, 2, 3, 0, 0]])))
    assert verification.equal and any("mean over rows" in note or "computed for" in note for note in verification.notes)
    assert {item.name for item in verification.of_kind("output")} == {"loss", "logits"}


def test_a_model_that_computes_nan_is_not_called_random(tmp_path: Path) -> None:
    package, source = captioner(tmp_path, torch.tensor([[4, 5, 6, 7, 8], [1, 2, 3, 9, 9]]))
    source = replace(source, kwargs={**source.kwargs, "tokens": torch.tensor([[0, 0, 0, 0, 8], [0, 0, 0, 9, 0]])})
    verification = verify(package, source)
    assert not verification.equal
    assert "nan" in verification.hint() and "example_inputs" in verification.hint()
