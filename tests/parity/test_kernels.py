"""Training with kernels whose backward is divided, or compiled, equals training the unsplit model. In one process."""

from __future__ import annotations

import pytest

from pipegraph.schedule import names
from pipegraph.schedule.recipes import trains
from tests.parity.cases import SCHEDULES
from tests.parity.training import TOLERANCE, expected_names
from tests.parity.workshop import Workshop

# A bias before a batch norm has a gradient of rounding alone, and compiled code rounds in another order.
COMPILED = {"rotary": TOLERANCE, "batch norm": 20 * TOLERANCE}
TRAINING = [name for name in names() if trains(name)]


# A chain of activations, and skips to stages far away; on as many ranks as it takes.
@pytest.mark.parametrize("schedule", [name for name in TRAINING if name not in SCHEDULES])
@pytest.mark.parametrize("case", ["llama", "unet"])
def test_every_schedule(made: Workshop, case: str, schedule: str) -> None:
    """The others are those of the matrix."""
    assert_equal(made, case, schedule, "eager", TOLERANCE, stages=4)


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_compiled(made: Workshop, schedule: str) -> None:
    assert_equal(made, "late input", schedule, "inductor", TOLERANCE, stages=4)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("case", COMPILED)
def test_inductor(made: Workshop, case: str, schedule: str) -> None:
    assert_equal(made, case, schedule, "inductor", COMPILED[case])


@pytest.mark.parametrize("case", ["llama", "dropout in evaluation mode"])
def test_autograd(made: Workshop, case: str) -> None:
    assert_equal(made, case, "zb-h1", "autograd", TOLERANCE)


def assert_equal(made: Workshop, case: str, schedule: str, kernels: str, tolerance: float, stages: int = 2) -> None:
    (found,) = made.in_one_process(case, schedule, stages, kernels)
    differences = found["differences"]
    assert differences.keys() == expected_names(made.reference(case))
    assert [item for item in differences.items() if not item[1] <= tolerance] == []
