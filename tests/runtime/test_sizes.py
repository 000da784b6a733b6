"""A step takes any batch and length that the capture allows, and is the step of the unsplit model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipegraph.errors import BatchError
from pipegraph.package import Package
from pipegraph.runtime.batch import StepSizes
from tests.messages import refused
from tests.runtime import ranks
from tests.runtime.pipelines import pipeline
from tests.runtime.sized_model import LENGTH, Model, assert_is_the_step_of_the_model, inputs, loss, write

# (rows, length): even and uneven microbatches, the captured length and others; some of them twice; too few rows for the
# microbatches.
BATCHES = [(8, LENGTH), (9, 11), (5, LENGTH), (9, 11), (4, 1), (10, 3), (2, 5), (1, 4)]


@pytest.mark.parametrize(
    ("schedule", "kernels"),
    [
        ("1f1b", "autograd"),
        pytest.param("zb-v", "eager", marks=pytest.mark.slow),  # which two processes run below
        pytest.param("interleaved-1f1b", "eager", marks=pytest.mark.slow),
    ],
)
def test_steps_of_every_size(schedule: str, kernels: str, tmp_path: Path) -> None:
    microbatches = 4 if schedule != "zb-v" else 3
    pipe = pipeline(write(tmp_path), schedule, kernels, microbatches=microbatches, loss_fn=loss)
    for rows, length in BATCHES:
        assert_is_the_step_of_the_model(pipe, rows, length)


def steps(rank: int, folder: str) -> str:
    pipe = pipeline(folder, "zb-v", "eager", microbatches=3, loss_fn=loss)
    for rows, length in BATCHES:
        assert_is_the_step_of_the_model(pipe, rows, length)
    return "equal"


def steps_without_inputs(rank: int, folder: str) -> str:
    pipe = pipeline(folder, "1f1b", microbatches=4, loss_fn=loss)
    input_names = {name for stage in pipe.stages for name in pipe.package.manifest.stages[stage].inputs}
    for rows, length in BATCHES:
        x, bias, table = inputs(rows, length)
        torch.manual_seed(0)
        model, target = Model(), torch.randn(rows, length, 3)
        expected = loss(model(x, bias, table), target).detach()
        arguments = [
            tensor if name in input_names else None
            for name, tensor in zip(pipe.package.manifest.args, (x, bias, table), strict=True)
        ]
        result = pipe.step(*arguments, target=target if rank == 3 else None)
        torch.testing.assert_close(result.loss, expected)
    return "equal"


def batches_that_differ(rank: int, folder: str, rows: list[int], microbatches: list[int]) -> str:
    pipe = pipeline(folder, "zb-v", "autograd", microbatches=3, loss_fn=loss, timeout=20)
    target = torch.zeros(rows[rank], LENGTH, 3)
    try:
        pipe.step(*inputs(rows[rank], LENGTH), target=target, microbatches=microbatches[rank])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("function", "count"), [pytest.param(steps, 2, marks=pytest.mark.slow), (steps_without_inputs, 4)]
)
def test_steps_over_processes(function: object, count: int, tmp_path: Path) -> None:
    assert ranks.run(function, count, str(write(tmp_path))) == ["equal"] * count


@pytest.mark.parametrize(
    ("rows", "microbatches", "message"),
    [
        ([6, 7], [3, 3], "batches of different sizes: 3 microbatches of [2, 2, 2] rows, x_1 6 on rank 0; "),
        ([7, 6], [3, 3], "x_1 6 on rank 0; 3 microbatches of [2, 2, 2] rows, x_1 6 on rank 1.\nTry: the same batch"),
        ([65, 65], [64, 65], "asked for different numbers of microbatches: 64 on rank 0; 65 on rank 1"),
        ([65, 65], [64, 8], "asked for different numbers of microbatches: 64 on rank 0; 8 on rank 1"),
        ([65, 65], [8, 64], "asked for different numbers of microbatches: 8 on rank 0; 64 on rank 1"),
    ],
)
def test_ranks_with_other_batches_are_stopped(
    rows: list[int], microbatches: list[int], message: str, tmp_path: Path
) -> None:
    """Both raise the same error, before one sends more than the other has memory for: gloo would end the process."""
    messages = ranks.run(batches_that_differ, 2, str(write(tmp_path)), rows, microbatches)
    assert messages[0] == messages[1]
    assert messages[0].startswith("RuntimeFault: ranks of one pipeline were ")
    assert message in messages[0]


def test_what_is_refused(tmp_path: Path) -> None:
    pipe = pipeline(write(tmp_path), microbatches=4, loss_fn=loss)
    x, bias, table = inputs(8, LENGTH)
    target = torch.zeros(8, LENGTH, 3)
    for arguments, parts, advice in [
        ((x[:0], bias[:, :0], table), ["0 rows", "1 or more"], "1 row or more"),
        ((x, bias[:, :7], table), ["bias", "7 rows", "8"], "[6, 8, 8]"),
        ((x, bias[:5], table), ["bias", "[5, 8, 8]", "[6, 8, 8] with batch 8, x_1 6"], "that shape"),
        ((x[0], bias, table), ["x has the shape [6, 8]", "x float32[batch, x_1, 8]"], "3 dimensions"),
    ]:
        with refused(BatchError, *parts, advice=advice):
            pipe.step(*arguments, target=target)
    with refused(BatchError, "target has 7 rows", "8", advice="8 rows"):
        pipe.step(x, bias, table, target=target[:7])
    pipe.step(x, bias, table, target=target)


def test_rows_are_cut_as_evenly_as_they_go() -> None:
    sizes = StepSizes.even({"batch": 10, "tokens_1": 7}, 4)
    assert [microbatch.sizes["batch"] for microbatch in sizes.microbatches] == [3, 3, 2, 2]
    assert sizes.weights == [0.3, 0.3, 0.2, 0.2]
    assert not sizes.is_even and StepSizes.even({"batch": 8}, 4).is_even


def test_the_manifest_says_where_the_batch_is(tmp_path: Path) -> None:
    values = Package.open(write(tmp_path)).manifest.values
    assert {name: values[name].batch_dim for name in ("x", "bias", "table")} == {"x": 0, "bias": 1, "table": None}
