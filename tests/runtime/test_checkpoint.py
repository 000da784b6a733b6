"""Checkpoints: written whole, and read back at other cuts, schedules and meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime import checkpoint_models as models
from tests.runtime.packages import write


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in 1, 2 and 4 stages."""
    folder = tmp_path_factory.mktemp("packages")
    for stages in (1, 2, 4):
        write(models.perceptrons(stages), folder / str(stages))
    return folder


@pytest.fixture(scope="module")
def saved(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float | None]]:
    """The folder of a run of 2 stages that was saved at step 5, and its losses after that."""
    folder = tmp_path_factory.mktemp("run")
    run = models.start(packages / "2")
    run.train(0, 5)
    assert run.save(folder, 5) == folder / "step-00000005"
    return folder, run.train(5, 10)


@pytest.mark.parametrize(("stages", "schedule"), [("2", "1f1b"), ("4", "zb-v"), ("1", "gpipe"), ("4", "zb-h1")])
def test_it_goes_on_at_other_cuts_and_schedules(
    packages: Path, saved: tuple[Path, list[float | None]], stages: str, schedule: str
) -> None:
    folder, losses = saved
    run = models.start(packages / stages, schedule)
    run.train(0, 1)
    checkpoint = run.load(folder)
    assert (checkpoint.step, checkpoint.folder, checkpoint.extra) == (5, folder / "step-00000005", {})
    assert run.train(5, 10) == losses
