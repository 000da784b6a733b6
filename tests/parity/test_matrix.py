"""Training a package equals training the unsplit model: losses, outputs, every gradient, and the state after it.

Two optimizer steps, float32, in one process and in real ones.
"""

from __future__ import annotations

import pytest

from tests.parity.cases import CASES, SCHEDULES, STAGES
from tests.parity.training import TOLERANCE, expected_names
from tests.parity.workshop import Workshop


# Cases in turn, so that two workers begin with different models, whose packages they write.
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["one process", "torchrun"])
def test_training_equals_the_unsplit_model(made: Workshop, mode: str, case: str, stages: int, schedule: str) -> None:
    run = made.under_torchrun if mode == "torchrun" else made.in_one_process
    found = run(case, schedule, stages)
    assert [rank["error"] for rank in found if "error" in rank] == []

    compared = {name: difference for rank in found for name, difference in rank["differences"].items()}
    assert compared.keys() == expected_names(made.reference(case))
    different = [item for rank in found for item in rank["differences"].items() if not item[1] <= TOLERANCE]
    assert different == []

    for name in {name for rank in found for name in rank["copies"]}:
        copies = [digest for rank in found for digest in rank["copies"].get(name, [])]
        assert len(copies) > 1 and len(set(copies)) == 1, f"the copies of {name} differ"
