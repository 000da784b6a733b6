"""Dropout on a GPU under `Pipeline(seed=)`: no cut, schedule, kernel or recompute draws other numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime import random_models as models


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    models.write_packages(folder)
    return folder


@pytest.mark.parametrize(
    ("cut", "schedule", "recompute", "kernels"),
    [
        ("two", "1f1b", "none", "eager"),
        ("three", "1f1b", "min-cut", "eager"),
        ("four", "zb-v", "block", "eager"),
        ("inside", "zb-v", "offload", "autograd"),
    ],
)
def test_they_are_the_same(packages: Path, cut: str, schedule: str, recompute: str, kernels: str) -> None:
    expected = models.train(models.start(packages / "one", device="cuda", kernels="eager"))
    assert len({*expected}) == len(expected)
    actual = models.train(models.start(packages / cut, schedule, device="cuda", recompute=recompute, kernels=kernels))
    assert actual == pytest.approx(expected, rel=1e-5)


def test_the_device_draws_no_others_of_the_user(packages: Path) -> None:
    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    models.train(models.start(packages / "two", device="cuda", kernels="eager"))
    assert torch.equal(torch.rand(4, device="cuda"), expected)
