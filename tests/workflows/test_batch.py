"""The inputs and the loss that ``pipegraph run`` makes for itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from msgspec import structs

from pipegraph.cost.model_output import default_loss, output_tensors, returned_loss
from pipegraph.errors import BatchError
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Manifest, ModelEntry, StageEntry, Value
from pipegraph.runtime.batch import cut_target
from pipegraph.workflows.batch import batch_from_manifest, batch_from_source, explain_model_mismatch, source_loss
from tests.messages import refused

MANIFEST = Manifest(
    generator="test",
    model=ModelEntry(),
    args=("tokens", ["mask", "scale"], None),
    kwargs={"flag": "flag"},
    outputs="y",
    values={
        "tokens": Value("tokens", "int64", (2, 50), -1, (0,), bound=7, batch_dim=0),
        "mask": Value("mask", "bool", (2, 50), -1, (0,), batch_dim=0),
        "scale": Value("scale", "bfloat16", (), -1, (0,)),
        "flag": Value("flag", "", (), -1, (), constant=3),
        "y": Value("y", "float32", (2, 3), 0, ()),
    },
    stages=(StageEntry(0, "stage_0", "Stage0", ("tokens", "mask", "scale"), ("y",)),),
)


def test_inputs_follow_the_manifest() -> None:
    batch = batch_from_manifest(MANIFEST, microbatches=3)
    tokens, (mask, scale), optional = batch.args
    assert (tokens.shape, tokens.dtype, int(tokens.min()), int(tokens.max())) == ((6, 50), torch.int64, 0, 6)
    assert (mask.shape, mask.dtype, set(mask.unique().tolist())) == ((6, 50), torch.bool, {False, True})
    assert (scale.shape, scale.dtype) == ((), torch.bfloat16)
    assert (optional, batch.kwargs, batch.target) == (None, {"flag": 3}, None)


def along(**dims: int | None) -> Manifest:
    """Of a model that takes these inputs, each with its batch there."""
    values = {name: Value(name, "float32", (2, 3), -1, (0,), batch_dim=dim) for name, dim in dims.items()}
    stage = StageEntry(0, "stage_0", "Stage0", (*dims,), ("y",))
    values["y"] = MANIFEST.values["y"]
    return structs.replace(MANIFEST, args=(*dims,), kwargs={}, values=values, stages=(stage,))


def test_only_the_batch_is_repeated() -> None:
    """The edges of a graph have no batch dimension, and sequences may have it after their length."""
    manifest = along(x=0, edges=None, steps=1)
    shapes = [(6, 3), (2, 3), (2, 9)]
    assert [tuple(tensor.shape) for tensor in batch_from_manifest(manifest, 3).args] == shapes
    source = ModelSource("model.py", "", torch.nn.Identity(), tuple(torch.ones(2, 3) for _ in range(3)), {})
    assert [tuple(tensor.shape) for tensor in batch_from_source(source, 3, manifest).args] == shapes


def test_inputs_are_seeded() -> None:
    first, second, third = (batch_from_manifest(MANIFEST, 2, seed).args[0] for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_example_inputs_are_repeated_for_every_microbatch() -> None:
    source = ModelSource(
        "model.py", "", torch.nn.Identity(), (torch.arange(2),), {"pair": (torch.tensor(1), None)}, None, torch.ones(2)
    )
    manifest = structs.replace(MANIFEST, args=("tokens",), kwargs={"pair": ("scale", None)})
    batch = batch_from_source(source, 2, manifest)
    assert batch.args[0].tolist() == [0, 1, 0, 1]
    assert batch.kwargs == {"pair": (torch.tensor(1), None)}
    assert batch.target.shape == (4,)
    assert source_loss(source) is default_loss


def test_example_inputs_have_the_rows_that_are_asked_for() -> None:
    source = ModelSource("model.py", "", torch.nn.Identity(), (torch.arange(6).view(2, 3),), {}, batch=3, seq=2)
    batch = batch_from_source(source, 1, along(tokens=0))
    assert batch.args[0].tolist() == [[0, 1], [3, 4], [0, 1]]


class Answer(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


def test_the_default_loss_is_the_one_that_the_model_returns() -> None:
    loss, logits = torch.tensor(3.0), torch.full((2, 2), 2.0)
    for output in (
        loss,
        {"logits": logits, "loss": loss},
        (loss, logits),
        Answer(logits, loss),
        SimpleNamespace(loss=loss),
    ):
        assert default_loss(output) is loss
    for count in ({"loss": logits}, {"loss": None, "logits": logits}, (torch.tensor(1), logits), ()):
        assert returned_loss(count) is None


def test_mean_square_takes_every_floating_point_output() -> None:
    output = {"logits": torch.full((2, 2), 2.0), "more": (torch.full((9,), 4.0), torch.tensor([7]), None)}
    assert default_loss(output).item() == pytest.approx((4 + 16) / 2)
    assert list(output_tensors(output)) == ["logits", "more.0", "more.1"]


def test_a_target_that_does_not_fit_its_inputs_is_blamed_on_no_package() -> None:
    source = ModelSource("other.py", "", torch.nn.Identity(), (), {})
    with (
        refused(BatchError, "target has 3 rows", "4", advice="4 rows") as raised,
        explain_model_mismatch(MANIFEST, source),
    ):
        cut_target(torch.zeros(3), 2, None, {4: [2, 2]})
    assert "package" not in str(raised.value)
    with (
        refused(BatchError, "Identity (other.py)", "tokens is missing", advice="model that was split"),
        explain_model_mismatch(MANIFEST, source),
    ):
        raise BatchError("tokens is missing.")
