"""What training steps are measured to take."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipegraph.package import Package
from pipegraph.schedule import build
from pipegraph.workflows.train import Training
from tests.runtime.packages import write
from tests.runtime.sketches import chain

NAP = 0.1


def test_the_bubble_is_that_of_whole_steps(tmp_path: Path) -> None:
    """Two of three forwards of a rank take long, and one of the other's, in turn: medians of actions add up to more."""
    package = Package.open(write(chain(2, width=16), tmp_path / "chain"))
    training = Training(package, build("gpipe", 2, 3), kernels="autograd")
    naps = {0: [NAP, NAP, 0.0], 1: [0.0, NAP, 0.0]}
    for number, stage in training._pipeline.stages.items():
        stage_naps = naps[number]

        def nap(*_: object, durations: list[float] = stage_naps) -> None:
            time.sleep(durations[0])
            durations.append(durations.pop(0))

        stage.register_forward_pre_hook(nap)
    list(training.steps(4))
    measured = training.measured()
    assert measured.step == pytest.approx(3 * NAP, rel=0.3)
    assert measured.bubble == pytest.approx(1 / 2, abs=0.1)  # of the medians of actions: less


def test_a_single_step_has_no_bubble(tmp_path: Path) -> None:
    package = Package.open(write(chain(2, width=16), tmp_path / "chain"))
    training = Training(package, build("gpipe", 2, 1), kernels="autograd")
    list(training.steps(1))
    assert training.measured().bubble is None
    list(training.steps(1))
    assert 0 < (training.measured().bubble or 0) < 1
