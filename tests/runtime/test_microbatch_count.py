"""A call may have another number of microbatches than the pipeline was made with, and fewer if its rows are too few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipegraph import schedule as schedules
from pipegraph.errors import ArgumentError, PipegraphError, ScheduleError
from pipegraph.runtime.schedule_choice import fewer_microbatches
from pipegraph.schedule import check
from tests.messages import refused
from tests.runtime import ranks
from tests.runtime.pipelines import pipeline
from tests.runtime.sized_model import LENGTH, assert_is_the_step_of_the_model, inputs, loss, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("package"))


def made_for_4(folder: Path, schedule: Any, **options: Any) -> Any:
    return pipeline(folder, schedule, loss_fn=loss, microbatches=4, **options)


def test_a_number_for_one_call(folder: Path) -> None:
    pipe = made_for_4(folder, "zb-v")
    for microbatches in (3, 5, None, 8, 3):
        assert_is_the_step_of_the_model(pipe, 8, LENGTH, microbatches)
        count = microbatches or 4
        assert len(pipe.last_sizes.microbatches) == count
    x = inputs(10, LENGTH)
    target = torch.zeros(10, LENGTH, 3)
    assert len(pipe.step(*x, target=target, microbatches=7, return_losses=True).losses) == 7


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved-1f1b", "gpipe"])
def test_as_many_microbatches_as_rows(schedule: str, folder: Path) -> None:
    """Also if the schedule cannot be built for this number: the last microbatches are then left out."""
    pipe = made_for_4(folder, schedule)
    for rows in (3, 2, 1):
        assert_is_the_step_of_the_model(pipe, rows, 5)
        assert [microbatch.sizes["batch"] for microbatch in pipe.last_sizes.microbatches] == [1] * rows


def test_an_order_of_ones_own_has_its_number(folder: Path) -> None:
    order = schedules.build("1f1b", 4, 4).changed(name="mine")
    pipe = made_for_4(folder, order)
    x, target = inputs(8, LENGTH), torch.zeros(8, LENGTH, 3)
    for call in (
        lambda: pipe.step(*x, target=target, microbatches=2),
        lambda: pipe.eval(*x, microbatches=8),
    ):
        with refused(ScheduleError, "mine is an order of 4 microbatches", advice="the name of a schedule"):
            call()
    assert_is_the_step_of_the_model(pipe, 8, LENGTH, 4)
    assert_is_the_step_of_the_model(pipe, 3, LENGTH)


def test_numbers_that_cannot_be(folder: Path) -> None:
    pipe = made_for_4(folder, "zb-v")
    x = inputs(8, LENGTH)
    for wrong in (0, -1, 2.0, True):
        with refused(ArgumentError, f"microbatches cannot be {wrong}", advice="whole number"):
            pipe.evaluate(*x, microbatches=wrong)
    with refused(ScheduleError, "zb-v", "2 microbatches", "2 ranks", advice="3 microbatches"):
        pipe.evaluate(*x, microbatches=2)
    pipe.step(*inputs(2, LENGTH), target=torch.zeros(2, LENGTH, 3))
    with pytest.raises(PipegraphError):  # still
        pipe.evaluate(*x, microbatches=2)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v", "interleaved-zb", "zb-h2"])
def test_a_schedule_without_its_last_microbatches_can_run(name: str) -> None:
    schedule = schedules.build(name, 4, 8)
    for count in (1, 3, 7):
        fewer = fewer_microbatches(schedule, count)
        check(fewer)
        assert fewer.microbatches == count and fewer.placement == schedule.placement


def other_numbers(rank: int, folder: str) -> str:
    pipe = pipeline(folder, "zb-v", "autograd", microbatches=3, loss_fn=loss, timeout=20)
    x, target = inputs(8, LENGTH), torch.zeros(8, LENGTH, 3)
    pipe.step(*x, target=target, microbatches=4)
    try:
        pipe.step(*x, target=target, microbatches=4 + rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_ranks_that_ask_for_other_numbers_are_stopped(folder: Path) -> None:
    messages = ranks.run(other_numbers, 2, str(folder))
    assert all("asked for different numbers of microbatches" in message for message in messages)
    assert all(message.startswith("RuntimeFault") for message in messages)
