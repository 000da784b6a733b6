"""What counts as a difference."""

from __future__ import annotations

import math

import pytest
import torch

from pipegraph.workflows.verify import TensorComparison, Verification, _compare_named

ONE = torch.tensor([1.0, -4.0])


def difference(found: torch.Tensor | None, reference: torch.Tensor | None, kind: str = "gradient") -> TensorComparison:
    beside = {"beside": torch.tensor([100.0])}
    named = _compare_named(kind, {"it": reference} | beside, {"it": found} | beside)
    return next(comparison for comparison in named if comparison.name == "it")


def test_difference_is_relative_to_the_largest_value() -> None:
    assert difference(ONE + 4e-3, ONE).difference == pytest.approx(1e-3, rel=1e-3)
    assert difference(ONE, ONE).difference == 0


@pytest.mark.parametrize(
    ("found", "reference"),
    [
        (None, None),
        (torch.zeros(2), None),  # a gradient that was never made, and one of zeros
        (None, torch.zeros(2)),
        (torch.tensor([1.0, -math.inf]), torch.tensor([1.0, -math.inf])),
        (torch.full((2,), 1e-9), torch.zeros(2)),  # zero but for rounding, beside a gradient of 100
        (torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 1j])),
        (torch.tensor([1.0 + 2**-9], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16)),
    ],
)
def test_equal(found: torch.Tensor | None, reference: torch.Tensor | None) -> None:
    assert difference(found, reference).equal


@pytest.mark.parametrize(
    ("found", "reference"),
    [
        (None, ONE),
        (ONE, None),
        (torch.tensor([1.0, math.nan]), ONE),
        (torch.tensor([1.0, math.inf]), ONE),
        (ONE.double(), ONE),
        (ONE[None], ONE),
        (torch.tensor([1_000_000_007]), torch.tensor([1_000_000_008])),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),
    ],
)
def test_different(found: torch.Tensor | None, reference: torch.Tensor | None) -> None:
    assert not difference(found, reference).equal


def test_report_names_the_worst_first() -> None:
    comparisons = (
        TensorComparison("loss", "loss", 0.0, 1e-5),
        TensorComparison("gradient", "fine", 1e-9, 1e-5),
        TensorComparison("gradient", "bad", 0.5, 1e-5),
        TensorComparison("gradient", "worse", math.nan, 1e-5),
    )
    found = Verification(True, comparisons, same_weights=True, edited=("stage_0.py",))
    assert str(found).splitlines() == [
        "what      compared  largest difference  at",
        "loss             1             0.0e+00",
        "gradient         3                 nan  worse",
        "",
        "DIFFERENT:",
        "  gradient worse: nan",
        "  gradient bad: 5.0e-01",
    ]
    assert "stage_0.py" in found.hint()
    assert found.to_dict()["different"][0] == {"kind": "gradient", "name": "worse", "difference": "nan"}
