"""Sizes of a capture other than those it was traced at: a batch of 1, and the rows and tokens that a user asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import pipegraph
from pipegraph.errors import CaptureError
from pipegraph.graph.capture import capture_source
from pipegraph.graph.captured import Captured
from pipegraph.graph.nodes import shape_of
from pipegraph.graph.sources import load
from pipegraph.workflows.batch import loss_and_target
from tests.messages import refused
from tests.models.rotary import RotaryTransformer

MODELS = Path(__file__).parents[1] / "models"


class Joined(nn.Module):
    """A model that joins rows and tokens, as a language model does before its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, seq = tokens.shape
        return self.head(self.embed(tokens)).view(batch * seq, 11)


class Table(nn.Module):
    """A model whose table has one row for all rows of the batch: it asks for that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.linear(x) + table.view(1, 4)


class OneRow(nn.Module):
    """A model that takes one row only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.view(1, 4))


class Branch(nn.Module):
    """A model that does something else with one row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if x.shape[0] == 1 else x - x.mean(0))


def nodes_of(captured: Captured) -> list[object]:
    def form(leaf: Any) -> Any:
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf

    def described(node: fx.Node) -> object:
        return node.name, str(node.target), node.args, node.kwargs, pytree.tree_map(form, node.meta.get("val"))

    return [repr(described(node)) for node in captured.graph.nodes]


@pytest.mark.parametrize(("batch", "seq"), [(1, 7), pytest.param(3, 7, marks=pytest.mark.slow)])
def test_a_resized_capture_is_that_of_an_example_of_this_size(batch: int, seq: int) -> None:
    source = replace(load(str(MODELS / "rotary.py"), weights=False), model=RotaryTransformer(layers=1))
    resized = capture_source(replace(source, batch=batch, seq=seq))
    direct = capture_source(replace(source, args=(torch.zeros(batch, seq, dtype=torch.int64),)))
    assert resized.sizes == direct.sizes
    assert nodes_of(resized) == nodes_of(direct)


def test_a_batch_of_one_varies() -> None:
    captured = pipegraph.capture(Joined(), (torch.zeros(1, 5, dtype=torch.int64),))
    assert captured.sizes.captured == {"batch": 1, "tokens_1": 5}
    (returned,) = captured.returned
    assert tuple(returned.meta["val"].shape) == (5, 11)
    assert captured.sizes.fixed == ()


def test_a_model_may_have_no_inputs() -> None:
    class Alone(Table):
        def forward(self) -> Tensor:
            return self.linear(self.linear.bias)

    assert pipegraph.capture(Alone(), ()).sizes.captured == {}


def test_all_tensors_of_one_row_have_the_batch() -> None:
    class Two(Table):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.linear(x) * table

    captured = pipegraph.capture(Two(), (torch.zeros(1, 4), torch.zeros(1, 4)))
    assert [str(shape_of(node)[0].text) for node in captured.inputs] == ["batch", "batch"]  # type: ignore[attr-defined]


def test_a_table_of_one_row_has_none() -> None:
    captured = pipegraph.capture(Table(), (torch.zeros(1, 4), torch.zeros(1, 4)))
    assert captured.sizes.captured == {"batch": 1}
    assert "table.shape[0]" in {size.place for size in captured.sizes.fixed}


@pytest.mark.parametrize("model", [OneRow(), Branch()])
def test_a_model_that_is_another_one_with_one_row_keeps_it(model: nn.Module) -> None:
    captured = pipegraph.capture(model, (torch.zeros(1, 4),))
    assert captured.sizes.captured == {}
    assert "x.shape[0]" in {size.place for size in captured.sizes.fixed}


def test_dynamic_shapes_lets_a_size_of_one_vary() -> None:
    class Steps(Table):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).cumsum(0)

    captured = pipegraph.capture(Steps(), (torch.zeros(3, 1, 4),), dynamic_shapes={"x": {1: "batch"}})
    assert captured.sizes.captured == {"batch": 1}


def test_dynamic_shapes_fixes_a_batch_of_one() -> None:
    captured = pipegraph.capture(Joined(), (torch.zeros(1, 5, dtype=torch.int64),), dynamic_shapes=False)
    assert captured.sizes.captured == {}


MODEL = """
import torch
from torch import nn

model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(6, 6)) if {joined} else nn.Linear(6, 6)
example_inputs = (torch.randn(4, 3, 6) if {joined} else torch.randn(4, 6),)
example_target = torch.randn(12, 6) if {joined} else torch.randn(4, 6)
loss_fn = nn.functional.mse_loss
"""


def test_a_target_has_the_rows_and_tokens_that_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(joined=True))
    loss = loss_and_target(load(str(file), batch=2, seq=5))
    assert loss is not None
    assert loss[1].shape == (10, 6)
    file.write_text(MODEL.format(joined=False))
    loss = loss_and_target(load(str(file), batch=9))
    assert loss is not None
    assert loss[1].shape == (9, 6)


def test_a_size_that_does_not_vary_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(joined=False))
    with refused(CaptureError, "--seq 5", "dimension 1", "[4, 6]", advice="without --seq"):
        capture_source(load(str(file), weights=False, seq=5))


def test_a_size_that_the_model_refuses_is_refused() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).unflatten(0, (-1, 2))

    source = replace(load(str(MODELS / "chain.py"), weights=False), model=Halves())
    with refused(CaptureError, "--batch 3", advice="batch % 2 == 0"):
        capture_source(replace(source, args=(torch.zeros(4, 4),), batch=3))


def test_a_part_of_a_result_that_nothing_reads_has_the_new_size_too() -> None:
    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).topk(2).values

    source = load(str(MODELS / "rotary.py"), weights=False)
    resized = capture_source(replace(source, model=Best(), args=(torch.zeros(3, 8),), batch=5))
    (topk,) = (node for node in resized.nodes if str(node.target) == "aten.topk.default")
    assert [tuple(part.shape) for part in topk.meta["val"]] == [(5, 2), (5, 2)]
