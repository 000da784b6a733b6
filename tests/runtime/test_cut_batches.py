"""Batches that the caller has cut: lists with a tensor for each microbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from pipegraph.errors import BatchError, ScheduleError
from pipegraph.schedule import build
from tests.messages import refused
from tests.runtime import ranks, sized_model, step_ranks
from tests.runtime.packages import Sketch, Stage, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain
from tests.runtime.step_ranks import cut


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(sized_model.write(tmp_path_factory.mktemp("sized")))


@pytest.mark.parametrize(("schedule", "kernels"), [("1f1b", "autograd"), ("zb-h1", "eager")])
def test_lists_are_the_step_of_the_whole_batch(schedule: str, kernels: str, package: str) -> None:
    assert step_ranks.given_cut(None, package, schedule, kernels) == "equal"


@pytest.mark.parametrize(
    "alone",
    [pytest.param(False, id="every rank has all", marks=pytest.mark.slow), pytest.param(True, id="a rank has its own")],
)
def test_lists_given_to_ranks(alone: bool, package: str) -> None:
    """A rank without inputs learns the rows of each microbatch."""
    assert ranks.run(step_ranks.given_cut, 4, package, "1f1b", "autograd", alone) == ["equal"] * 4


def test_ranks_are_given_the_same_microbatches(tmp_path: Path) -> None:
    for message in ranks.run(step_ranks.given_otherwise, 4, str(sized_model.write(tmp_path))):
        assert "sizes: 4 microbatches of [3, 3, 2, 2] rows, x_1 6 on rank 0, rank 2, rank 3; " in message
        assert "4 microbatches of [3, 3, 3, 1] rows, x_1 6 on rank 1.\nTry: " in message


def mean(output: Tensor, target: Any) -> Tensor:
    return (output - target).square().mean()


X, TARGET = torch.randn(6, 8), torch.randn(6, 8)


def test_a_list_has_as_many_items_as_there_are_microbatches(tmp_path: Path) -> None:
    """The package fixes the rows of a microbatch to two."""
    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=2, loss_fn=mean, kernels="eager")
    expected = pipe.step(X, target=TARGET, microbatches=3)
    step_result = pipe.step(cut(X, [2, 2, 2]), target=cut(TARGET, [2, 2, 2]))
    assert step_result.loss == expected.loss
    assert pipe.step(cut(X, [2, 2, 2]), target=TARGET).loss == expected.loss  # what is whole is cut alike
    assert pipe.step(X, target=cut(TARGET, [2, 2, 2])).loss == expected.loss


@pytest.mark.parametrize(
    ("x", "target", "microbatches", "parts", "advice"),
    [
        (cut(X, [2, 2, 2]), cut(TARGET, [2, 4]), None, ["x is a list of 3", "target one of 2"], "equal lengths"),
        (cut(X, [2, 2, 2]), None, 2, ["x is a list of 3", "microbatches=2"], "each microbatch"),
        ([], None, None, ["x is a list of 0"], "each microbatch"),
        (cut(X, [2, 3, 1]), TARGET, None, ["x[1]", "[3, 8]", "microbatch 1", "[2, 8]"], "that shape"),
        ([X[:2], None], None, None, ["x[1] is missing"], "a tensor like x float32[2, 8]"),
        ([X[:2], X[2:4].double()], None, None, ["x[1] is float64", "float32"], "x[1].to(torch.float32)"),
        ([X[:2], X[0]], None, None, ["x[1]", "[8]", "[2, 8]"], "2 dimensions"),
        (cut(X, [2, 2, 2]), cut(TARGET, [2, 3, 1]), None, ["target[1] has 3 rows", "microbatch 1 has 2"], "2 rows"),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    x: Any, target: Any, microbatches: int | None, parts: list[str], advice: str, tmp_path: Path
) -> None:
    pipe = pipeline(write(chain(1), tmp_path / "chain"), loss_fn=mean)
    with refused(BatchError, *parts, advice=advice):
        pipe.step(x, target=target, microbatches=microbatches)


def test_an_order_of_so_many_microbatches_takes_lists_of_so_many(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), build("1f1b", 2, 2), loss_fn=mean)
    assert pipe.step(cut(X[:4], [2, 2]), target=TARGET[:4]).loss is not None
    with refused(ScheduleError, "3 microbatches", "1f1b is an order of 2", advice="an order of 3"):
        pipe.step(cut(X, [2, 2, 2]), target=TARGET)


def test_inputs_of_a_microbatch_have_its_length(package: str) -> None:
    pipe = pipeline(package, loss_fn=mean)
    x, bias, table = sized_model.inputs(4, 6)
    with refused(BatchError, "bias[1]", "[6, 2, 8]", "x_1 5", "[5, 2, 8]", advice="that shape"):
        pipe.step([x[:2], x[2:, :5]], cut(bias, [2, 2], 1), table, target=torch.zeros(4, 6, 3))


def test_rows_weigh_as_in_the_whole_batch(package: str) -> None:
    pipe = pipeline(package, loss_fn=mean, microbatches=2)
    x, bias, table = sized_model.inputs(6, 4)
    target = torch.randn(6, 4, 3)
    rows = [5, 1]
    result = pipe.step(cut(x, rows), cut(bias, rows, 1), table, target=cut(target, rows), return_losses=True)
    assert_close(result.loss, (5 * result.losses[0] + result.losses[1]) / 6)
    assert pipe.last_sizes is not None and pipe.last_sizes.weights == [5 / 6, 1 / 6]


def test_an_input_called_target_is_another_one(tmp_path: Path) -> None:
    values = {name: ("float32", (2, 8), name == "y") for name in ("x", "target", "y")}
    stage = Stage("x, target", "y", "self.layer = nn.Linear(8, 8)", "return self.layer(x) + target")
    pipe = pipeline(write(Sketch((stage,), values, "y"), tmp_path / "named"), loss_fn=mean)
    with refused(BatchError, "target is a list of 3", "target one of 2", advice="equal lengths"):
        pipe.step(X, cut(X, [2, 2, 2]), target=cut(TARGET, [3, 3]))
    expected = pipe.step(X, X, target=TARGET, microbatches=3).loss
    assert pipe.step(X, cut(X, [2, 2, 2]), target=TARGET).loss == expected


def test_a_batch_is_checked_without_a_step(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=3, loss_fn=mean)
    pipe.check_batch(X, target=TARGET)
    with refused(BatchError, "x has the shape [6, 4]", "[2, 8]", advice="that shape"):
        pipe.check_batch(X[:, :4], target=TARGET)
    with refused(BatchError, "target has 5 rows", "6", advice="6 rows"):
        pipe.check_batch(X, target=TARGET[:5])
    assert all(parameter.grad is None for parameter in pipe.parameters())
