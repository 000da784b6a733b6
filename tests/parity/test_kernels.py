"""Training with kernels whose backward is divided, or compiled, equals training the unsplit model. In one process."""

from __future__ import annotations

import pytest

from pipegraph.schedule import names
from pipegraph.schedule.recipes import trains
from tests.parity.cases import SCHEDULES
from tests.parity.training import TOLERANCE, expected_names
from tests.parity.workshop import Workshop
from tests.slow import LIKE_OTHERS, cases

TRAINING = [name for name in names() if trains(name)]

# A bias before a batch norm has a gradient of rounding alone, and compiled code rounds in another order.
COMPILED = [
    pytest.param("rotary", "zb-h1", TOLERANCE, marks=pytest.mark.slow),
    # tests/kernels/test_as_autograd.py compiles one, too.
    pytest.param("batch norm", "1f1b", 20 * TOLERANCE, marks=pytest.mark.slow),
    ("late input", "zb-v", TOLERANCE),
]


# The model has skips to distant stages; the schedule sets the number of ranks. The matrix has the other schedules.
@pytest.mark.parametrize(
    "schedule",
    cases([name for name in TRAINING if name not in SCHEDULES], slow=LIKE_OTHERS),
)
def test_every_schedule(shared_workshop: Workshop, schedule: str) -> None:
    assert_equal(shared_workshop, "unet", schedule, "eager", TOLERANCE, stages=4)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_tied_weights_on_ranks_with_several_stages(shared_workshop: Workshop, schedule: str) -> None:
    assert_equal(shared_workshop, "llama", schedule, "eager", TOLERANCE, stages=4)


@pytest.mark.parametrize(("case", "schedule", "tolerance"), COMPILED)
def test_inductor(shared_workshop: Workshop, case: str, schedule: str, tolerance: float) -> None:
    assert_equal(shared_workshop, case, schedule, "inductor", tolerance, stages=4 if schedule == "zb-v" else 2)


@pytest.mark.parametrize("case", cases(["llama", "dropout in evaluation mode"], slow=["llama"]))
def test_autograd(shared_workshop: Workshop, case: str) -> None:
    assert_equal(shared_workshop, case, "zb-h1", "autograd", TOLERANCE)


def assert_equal(workshop: Workshop, case: str, schedule: str, kernels: str, tolerance: float, stages: int = 2) -> None:
    (report,) = workshop.in_one_process(case, schedule, stages, kernels)
    differences = report["differences"]
    assert differences.keys() == expected_names(workshop.reference(case))
    assert [item for item in differences.items() if not item[1] <= tolerance] == []
