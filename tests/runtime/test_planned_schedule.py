"""A pipeline of which the caller names no schedule runs the plan of its package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import nn

import pipegraph
from pipegraph.errors import CheckpointError
from pipegraph.package import Package
from tests.messages import refused, warned
from tests.package.predictions import plan


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    points = pipegraph.plan(pipegraph.capture(model, (torch.randn(2, 4),)), points=["1", "2", "3"])
    return pipegraph.write_package(points, tmp_path_factory.mktemp("package") / "out")


def planned(package: Package, **changes: object) -> Package:
    return replace(package, manifest=structs.replace(package.manifest, plan=plan(4, **changes)))


def numbers(package: Package, *args: object) -> tuple[str, int, int]:
    schedule = pipegraph.Pipeline(package, *args, kernels="autograd").schedule  # type: ignore[arg-type]
    return schedule.name, schedule.microbatches, schedule.ranks


def test_without_a_plan(package: Package) -> None:
    assert numbers(package) == ("1f1b", 1, 4) and numbers(package, "gpipe", 3) == ("gpipe", 3, 4)


def test_as_planned(package: Package) -> None:
    of_v = planned(package, schedule="zb-v", ranks=2, placement=(0, 1, 1, 0), microbatches=6)
    assert numbers(of_v) == ("zb-v", 6, 2)
    assert numbers(of_v, None, 8) == ("zb-v", 8, 2) and numbers(of_v, "1f1b") == ("1f1b", 6, 4)
    of_loop = planned(package, schedule="interleaved-1f1b", ranks=1)
    assert numbers(of_loop) == ("interleaved-1f1b", 4, 1)
    order = pipegraph.schedule.build("gpipe", 4, 2).changed(name="mine")
    assert numbers(of_v, order) == ("mine", 2, 4)


def test_a_plan_with_an_order_of_its_own(package: Package) -> None:
    with warned("best", "1f1b runs instead", "schedule=FILE"):
        assert numbers(planned(package, schedule="best")) == ("1f1b", 4, 4)


def test_an_optimizer_of_other_parameters_is_not_saved(package: Package, tmp_path: Path) -> None:
    """It would train the model that was split, and not the pipeline."""
    pipe = pipegraph.Pipeline(package, kernels="autograd")
    optimizer = torch.optim.AdamW(nn.Linear(4, 4).parameters())
    with refused(CheckpointError, "optimizer", "shape [4, 4]", advice="pipe.parameters()"):
        pipe.save(tmp_path, optimizer, step=1)
