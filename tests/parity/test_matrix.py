"""Training a package equals training the unsplit model: losses, outputs, every gradient, and the state after it.

Two optimizer steps, float32. Three stages run in one process; two and four stages run in one process for each stage.
"""

from __future__ import annotations

import pytest

from tests.parity.cases import CASES, IN_PROCESSES, STAGES, schedule_of
from tests.parity.training import TOLERANCE, expected_names
from tests.parity.workshop import Workshop

LARGER = ("llama", "llama accumulated", "rotary", "t5", "transformer")
# Cases in turn, so that two workers begin with different models, whose packages they write.
# `make test` leaves out processes, which tests/runtime/test_distributed.py has, and the larger models.
CELLS = [
    pytest.param(
        case,
        stages,
        schedule_of(case, stages),
        marks=[pytest.mark.slow] if stages in IN_PROCESSES or case in LARGER else [],
    )
    for stages in STAGES
    for case in CASES
]


@pytest.mark.timeout(300)  # the first one in processes writes all packages and waits for all cases
@pytest.mark.parametrize(("case", "stages", "schedule"), CELLS)
def test_training_equals_the_unsplit_model(shared_workshop: Workshop, case: str, stages: int, schedule: str) -> None:
    if stages in IN_PROCESSES:
        reports = shared_workshop.in_processes(case, stages)
    else:
        reports = shared_workshop.in_one_process(case, schedule, stages)
    assert [rank["error"] for rank in reports if "error" in rank] == []

    compared = {name: difference for rank in reports for name, difference in rank["differences"].items()}
    assert compared.keys() == expected_names(shared_workshop.reference(case))
    allowed = CASES[case].rounding * TOLERANCE
    different = [item for rank in reports for item in rank["differences"].items() if not item[1] <= allowed]
    assert different == []

    for name in {name for rank in reports for name in rank["copies"]}:
        copies = [digest for rank in reports for digest in rank["copies"].get(name, [])]
        assert len(copies) > 1 and len(set(copies)) == 1, f"the copies of {name} differ"
