"""The survey: what it says of models that are right, of one that is wrong in silence, and of source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from benchmarks.survey import __main__ as command
from benchmarks.survey import catalogue
from benchmarks.survey.comparison import difference, rounding
from benchmarks.survey.examination import Verdict, examine
from benchmarks.survey.source_counts import SourceCounts, count, numbers, products
from benchmarks.survey.survey_case import SurveyCase, rows
from benchmarks.survey.table import cell
from benchmarks.survey.zoo import ZOO


class ChangedByExport(nn.Module):
    """Gives other numbers to export than to its caller, and takes no batch of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("one row")
        for layer in self.layers:
            x = layer(x)
        return 2 * x if torch.compiler.is_compiling() else x


WRONG = SurveyCase("wrong", "here", ChangedByExport, rows(4))
SOURCE = """
class Layer(nn.Module):
    def __init__(self):
        self.width = 39
    def forward(self, x):
        return x[:, :13] * self.constant_1 + self.other.constant + torch.ops.my.op(x).view(3, -1) + x.chunk(3)[0]
class Layer2(nn.Module):
    pass
class Conv2(nn.Module):
    pass
"""


def test_two_models_of_the_zoo_are_right(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        command.app, ["--only", "two towers", "--only", "called twice", "--markdown"], catch_exceptions=False
    )
    assert done.exit_code == 0
    table = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| two", "| one"))]
    assert [len(row) for row in table] == [11, 11, 8, 8]
    assert "2 of 2 models split" in done.stderr and "0 silent errors" in done.stderr


def test_a_wrong_number_is_a_silent_error_and_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = examine(WRONG, tmp_path)
    assert report.has_silent_error
    assert [cell(report.outcomes[name]) for name in ("verify", "evaluation")] == ["differs", "**1e+00**"]
    assert report.outcomes["batch 1"].verdict is Verdict.NOT_TAKEN
    monkeypatch.setattr(catalogue, "cases", lambda: [WRONG])
    assert CliRunner().invoke(command.app, []).exit_code == 1


def test_every_model_has_a_name_of_its_own_and_inputs_that_it_takes() -> None:
    cases = catalogue.cases()
    assert len({case.name for case in cases}) == len(cases) >= len(ZOO) + 22
    for case in cases:
        if case.origin == "written here":
            args, kwargs = case.arguments(1)
            case.model().eval()(*args, **kwargs)


def test_what_no_person_writes_is_counted(tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text(SOURCE)
    assert count(tmp_path) == SourceCounts(lines=10, numbered=1, operators=1, constants=2)
    assert numbers(tmp_path) == {13: 1, 3: 2, 1: 1, 0: 1}
    assert products({1, 3, 13}) == {3, 13, 39}


def test_a_difference_is_relative_and_infinite_where_nothing_compares() -> None:
    tensors = {"x": torch.ones(3)}
    assert difference(tensors, {"x": torch.tensor([1.0, 1.0, 1.5])}) == 0.5
    assert difference(tensors, tensors | {"y": None}) == difference(tensors, {"x": torch.ones(2)}) == float("inf")
    assert difference({"x": torch.tensor([float("-inf"), 1])}, {"x": torch.tensor([float("-inf"), 1])}) == 0
    assert difference(tensors, {"x": torch.full((3,), float("nan"))}) == float("inf")
    assert rounding(tensors, {"x": torch.tensor([1, 1, 1.25], dtype=torch.float64)}) == 0.25
