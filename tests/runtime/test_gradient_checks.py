"""What ranks that share a stage train: the same parameters, and the same gradients of those that each has whole."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipegraph.errors import PipegraphError
from pipegraph.runtime.gradient_checks import ReplicatedGradientCheck
from tests.messages import refused
from tests.runtime import gradient_ranks, mesh_mixture, ranks


class TwoRanks(SimpleNamespace):
    """A world in which the other rank along `tp` has the same norms, or twice those of this one."""

    factor, sent = 1.0, 0

    def gather(self, figures: list[float], *_: str) -> list[list[float]]:
        self.sent += 1
        return [figures, [self.factor * figure for figure in figures]]


class OneStage(SimpleNamespace):
    """A process with stage 0 alone."""

    @property
    def trained_flags(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self.stages[0].parameters())


def test_each_whole_parameter_is_compared_once_when_its_gradient_says_something() -> None:
    stage, world = nn.Linear(2, 1), TwoRanks()
    process: Any = OneStage(stages={0: stage}, numbers=SimpleNamespace(seed=0))
    of_world: Any = world
    gradient_check = ReplicatedGradientCheck(process, of_world)

    def sent_after_step(weight: float | None, bias: float | None) -> int:
        for parameter, value in ((stage.weight, weight), (stage.bias, bias)):
            parameter.grad = None if value is None else torch.full_like(parameter, value)
        sent_before = world.sent
        gradient_check.before_step()
        gradient_check.check()
        return world.sent - sent_before

    stage.bias.requires_grad_(False)
    assert sent_after_step(0.0, None) == 1, "0 says nothing"
    assert sent_after_step(math.inf, None) == 1, "and neither does what a GradScaler leaves out"
    assert sent_after_step(1.0, None) == 1
    world.factor = 2.0
    assert sent_after_step(1.0, None) == 0, "all that is trained was compared"
    stage.bias.requires_grad_(True)
    with refused(PipegraphError, "gradients of bias", advice="replicated_with_grad_allreduce"):
        sent_after_step(1.0, 1.0)


@pytest.mark.slow  # what is compared when is tested above without processes
def test_a_whole_parameter_is_compared_in_a_pipeline(tmp_path: Path) -> None:
    """A slope gets a part of the features on each rank. Its gradient may be 0, absent or infinite in the first step."""
    folder = mesh_mixture.write(tmp_path / "slopes", "slopes", 2)
    expected = {"": 0, "zeros": 1, "frozen": 1, "infinite": 1, "zeros, frozen": 1}
    cases = [*((how, gradient_ranks.PLAN) for how in expected), ("zeros, frozen", gradient_ranks.SUMMED)]
    for *outcomes, trained in ranks.run(gradient_ranks.when_refused, 2, folder, cases):
        assert [step for step, _ in outcomes] == [*expected.values()]
        for _, message in outcomes:
            assert re.search(r"^PipegraphError: .*gradients of layers\.\d\.slope\.weight", message), message
            assert '"replicated_with_grad_allreduce" for layers.' in message
        assert trained == (3, "trained")


def test_random_numbers_that_differ_are_named_as_the_cause(tmp_path: Path) -> None:
    folder = mesh_mixture.write(tmp_path / "dropout", "slopes and dropout", 2)
    for without, seeded in ranks.run(gradient_ranks.dropped_with_other_seeds, 2, folder):
        assert "random numbers" in without and "Try: Pipeline(seed=0)" in without
        assert seeded == "trained"


@pytest.mark.parametrize(
    "dimension",
    ["dp_replicate", pytest.param("dp_shard", marks=pytest.mark.slow), pytest.param("tp", marks=pytest.mark.slow)],
)
def test_ranks_that_hold_the_same_stages_train_the_same(dimension: str, tmp_path: Path) -> None:
    folder = mesh_mixture.write(tmp_path / "slopes", "slopes", 2)
    for message in ranks.run(gradient_ranks.freeze_on_one_rank, 2, folder, dimension):
        assert re.search(
            r"^RuntimeFault: layers\.0\.up\.weight of stage 0 .*rank 0.* not on rank 1.*4 more parameters",
            message,
        ), message
