"""What counts as a difference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import pipegraph
from pipegraph.graph.sources import load
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Package
from pipegraph.workflows.reference_step import (
    TOLERANCE,
    TensorComparison,
    compare,
    compare_named,
    verification_batch,
    within_rounding,
)
from pipegraph.workflows.verify import Verification, verify

REFERENCE = torch.tensor([1.0, -4.0])


def difference(tensor: torch.Tensor | None, reference: torch.Tensor | None, kind: str = "gradient") -> TensorComparison:
    extra = {"beside": torch.tensor([100.0])}
    named = compare_named(kind, {"it": reference} | extra, {"it": tensor} | extra)
    return next(comparison for comparison in named if comparison.name == "it")


def test_difference_is_relative_to_the_largest_value() -> None:
    assert difference(REFERENCE + 4e-3, REFERENCE).difference == pytest.approx(1e-3, rel=1e-3)
    assert difference(REFERENCE, REFERENCE).difference == 0


@pytest.mark.parametrize(
    ("found", "reference"),
    [
        (None, None),
        (torch.zeros(2), None),  # a gradient that was never made, and one of zeros
        (None, torch.zeros(2)),
        (torch.tensor([1.0, -math.inf]), torch.tensor([1.0, -math.inf])),
        (torch.full((2,), 1e-9), torch.zeros(2)),  # zero except for rounding: another gradient is 100
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
        (None, REFERENCE),
        (REFERENCE, None),
        (torch.tensor([1.0, math.nan]), REFERENCE),
        (torch.tensor([1.0, math.inf]), REFERENCE),
        (REFERENCE.double(), REFERENCE),
        (REFERENCE[None], REFERENCE),
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
    outcome = Verification(True, comparisons, edited=("stage_0.py",))
    assert str(outcome).splitlines() == [
        "what      compared  largest difference  at",
        "loss             1             0.0e+00",
        "gradient         3           nan        worse",
        "",
        "DIFFERENT:",
        "  gradient worse: nan",
        "  gradient bad: 5.0e-01",
    ]
    assert "stage_0.py" in outcome.hint()
    assert outcome.to_dict()["different"][0] == {"kind": "gradient", "name": "worse", "difference": "nan"}


def report(*comparisons: TensorComparison, **options: Any) -> Verification:
    return Verification(True, comparisons, **options)


def test_the_hint_fits_the_cause() -> None:
    weights = [TensorComparison("weight", name, 0.5, 0.0) for name in ("first.weight", "last.weight")]
    fine = TensorComparison("weight", "same", 0.0, 0.0)
    output = TensorComparison("output", "output", 0.5, 1e-5)
    small = TensorComparison("gradient", "first.weight", 2e-5, 1e-5)
    dtype_comparison = compare("weight", "first.weight", REFERENCE.bfloat16(), REFERENCE)
    hints = {
        "first.weight is the first that differs, of 2 that do and 3 in all.\nTry: seed": report(fine, *weights, output),
        "ckpt holds other weights than the model: first.weight": report(*weights, weights="ckpt"),
        "types: first.weight is bfloat16, and float32 in the model.\nTry: build_model with the dtypes": report(
            dtype_comparison, output
        ),
        "Edited since they were written: a.py": report(output, edited=("a.py",)),
        "it draws random numbers.\nTry: ": report(output, is_random=True),
        "arrives contiguous, and in the model it may have another layout of memory.\nTry: ": report(small),
        "Try: split again, as the model's source": report(output, small),
    }
    assert [text for text, outcome in hints.items() if text not in outcome.hint()] == []


def test_what_rounding_changes_is_no_difference() -> None:
    def widened(kind: str, difference: float, rounding: float) -> TensorComparison:
        return within_rounding(TensorComparison(kind, "it", difference, 1e-5), rounding)

    assert widened("gradient", 1.5e-5, 2e-6).equal
    assert not widened("gradient", 1.5e-5, 1e-7).equal
    assert widened("loss", 0.5, 0.1).equal  # nearly 0: all of it is rounding
    assert not widened("gradient", 0.5, 0.1).equal
    assert not widened("loss", math.nan, 0.1).equal and not widened("loss", math.inf, 0.1).equal


MODEL = """
import torch
from torch import nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.apply_first = lambda x: self.first(x)

    def forward(self, x):
        return self.last({forward})


def build_model():
    {seed}
    return Model()


def loss_fn(output):
    return {loss}


example_inputs = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)
"""


def written(
    folder: Path,
    forward: str = "torch.tanh(self.apply_first(x))",
    seed: str = "torch.manual_seed(0)",
    loss: str = "output.square().mean()",
) -> tuple[Package, ModelSource]:
    """The package and the source of a model file."""
    file = folder / "model.py"
    file.write_text(MODEL.format(forward=forward, seed=seed, loss=loss))
    source = load(str(file))
    plan = pipegraph.plan(pipegraph.capture(source.model, source.args), points=["last"])
    return pipegraph.write_package(plan, folder / "out", source=source), source


def edited(package: Package, original: str, replacement: str) -> Package:
    """The same with another text in the first stage."""
    file = package.path / "stage_0.py"
    text = file.read_text()
    assert original in text
    file.write_text(text.replace(original, replacement))
    return Package.open(package.path)


def test_a_lambda_that_holds_its_module(tmp_path: Path) -> None:
    """A deep copy of the model would call the layer of the original, and have no gradient for its own."""
    outcome = verify(*written(tmp_path))
    assert outcome.equal, str(outcome)
    assert {item.name for item in outcome.of_kind("gradient")} == {
        "first.weight",
        "first.bias",
        "last.weight",
        "last.bias",
    }


def test_a_loss_with_metrics(tmp_path: Path) -> None:
    """It is the loss of a plan as well."""
    loss = "output.square().mean(), {'largest': output.max()}"
    package, source = written(tmp_path, loss=loss)
    outcome = verify(package, source)
    assert outcome.equal, str(outcome)
    captured = pipegraph.capture(source.model, source.args)
    first, second = (
        pipegraph.plan(captured, stages=2, loss=(loss_fn, None))
        for loss_fn in (lambda output, target: source.loss_fn(output), lambda output, target: output.square().mean())
    )
    assert first.points == second.points


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    package, source = written(tmp_path)
    weights = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}
    verify(package, source)
    assert all(parameter.grad is None for parameter in source.model.parameters()) and source.model.training
    assert all(torch.equal(tensor, weights[name]) for name, tensor in source.model.state_dict().items())


def test_other_weights_are_named(tmp_path: Path) -> None:
    package, source = written(tmp_path)
    with torch.no_grad():
        source.model.last.weight[0, 0] += 1e-3
    outcome = verify(package, source)
    assert [item.name for item in outcome.different if item.kind == "weight"] == ["last.weight"]
    assert "last.weight is the first that differs, of 1 that do and 4 in all.\nTry: seed build_model" in outcome.hint()


def test_an_unseeded_model_is_built_anew_with_the_same_values(tmp_path: Path) -> None:
    package, source = written(tmp_path, seed="torch.seed()")
    assert verify(package, source).equal


def test_a_loss_that_is_nearly_zero(tmp_path: Path) -> None:
    """Its last digits are those of numbers a million times larger; an error in these is still found."""
    _, source = written(tmp_path)
    near = tmp_path / "near"
    near.mkdir()
    batch = verification_batch(source, Package.open(tmp_path / "out").manifest).whole_batch
    assert batch is not None
    mean = source.model(*batch.args).sum(1).mean().item()
    package, source = written(near, loss=f"output.sum(1).mean() - {mean} + 2e-6")
    outcome = verify(edited(package, "return ", "return 1.0000002 * "), source)
    assert outcome.equal, str(outcome)
    assert outcome.of_kind("loss")[0].difference > TOLERANCE
    outcome = verify(edited(package, "return 1.0000002 *", "return 1.001 *"), source)
    assert not outcome.equal


def test_a_random_model_is_told(tmp_path: Path) -> None:
    package, source = written(tmp_path, forward="F.dropout(self.first(x), 0.5, training=True)")
    outcome = verify(package, source)
    assert not outcome.equal and "it draws random numbers" in outcome.hint()


def test_outputs_of_training_alone(tmp_path: Path) -> None:
    forward = "x) if not self.training else (self.last(self.first(x)), self.first(x)"
    package, source = written(tmp_path, forward, loss="output[0].square().mean()")
    outcome = verify(package, source)
    assert outcome.equal, str(outcome)
    assert len(outcome.of_kind("evaluation")) == 1
