"""Sizes that do not vary are named with the line that fixes them; ``dynamic_shapes`` says which have to vary."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import pipegraph
from pipegraph.errors import CaptureError
from pipegraph.graph import symbolic_size
from pipegraph.graph.export import input_sizes, shape_expression_limit, torch_export
from pipegraph.graph.export.shape_expression_limit import is_long
from pipegraph.package import Package
from pipegraph.package import sizes as package_sizes
from tests.messages import refused


class Steps(nn.Module):
    """Runs over time steps in Python, and scales by the root of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = self.linear(x[:, 0])
        for step in range(1, x.shape[1]):  # fixes the length
            h = h + self.linear(x[:, step])
        return h * table.shape[1] ** 0.5


class Scaled(nn.Module):
    """Takes any number of rows and any length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, frames: Tensor, extra: dict[str, Tensor] | None = None) -> Tensor:
        h = self.linear(frames)
        return h if extra is None else h * extra["scale"]


FRAMES = torch.zeros(5, 3, 8)


def sizes(dynamic_shapes: Any) -> dict[str, int]:
    captured = pipegraph.capture(Scaled(), (FRAMES,), dynamic_shapes=dynamic_shapes)
    return dict(captured.sizes.captured)


def test_the_line_that_fixes_a_size_is_named() -> None:
    captured = pipegraph.capture(Steps(), (torch.zeros(3, 5, 8), torch.zeros(1, 7)))
    fixed = {size.place: size for size in captured.sizes.fixed}
    assert re.search(r"test_dynamic_shapes\.py:\d+: for step in range\(1, x\.shape\[1\]\)", fixed["x.shape[1]"].line)
    assert fixed["x.shape[1]"].place_in_source.startswith("test_dynamic_shapes.py:")
    assert "Linear" in fixed["x.shape[2]"].line or "self.linear" in fixed["x.shape[2]"].line
    assert "capture 2 or more" in fixed["table.shape[0]"].reason
    assert "cannot express" in fixed["table.shape[1]"].reason
    assert "return h * table.shape[1] ** 0.5" in fixed["table.shape[1]"].line
    assert "x.shape[0]" not in fixed


def test_a_stage_says_what_fixes_its_sizes() -> None:
    captured = pipegraph.capture(Steps(), (torch.zeros(3, 5, 8), torch.zeros(2, 7)))
    from pipegraph.codegen.package_files import generate

    text = generate(pipegraph.plan(captured, stages=1), weights=False).files["stage_0.py"]
    assert re.search(r"is 8 in every\s+batch\s+\(test_dynamic_shapes\.py:\d+\)", text)
    assert "x.shape[1] is" not in text  # the author's loop takes any number of steps


@pytest.mark.parametrize(
    ("dynamic_shapes", "expected"),
    [
        (None, {"batch": 5, "frames_1": 3}),
        (False, {}),
        ({"frames": {1: "rows"}}, {"rows": 3}),
        ({"frames": {0: Dim("length", max=64), 1: "batch"}}, {"length": 5, "batch": 3}),
        (({0: "rows", 1: Dim.AUTO},), {"batch": 5, "frames_1": 3}),  # what is cut is called batch in any case
        (({0: Dim.DYNAMIC, 1: None},), {"batch": 5}),
    ],
)
def test_dynamic_shapes(dynamic_shapes: Any, expected: dict[str, int]) -> None:
    assert sizes(dynamic_shapes) == expected


def test_bounds_are_those_of_the_package() -> None:
    captured = pipegraph.capture(Scaled(), (FRAMES,), dynamic_shapes={"frames": {0: Dim("rows", min=2, max=64)}})
    assert (captured.sizes.lowest, captured.sizes.highest) == ({"batch": 2}, {"batch": 64})


def test_nested_arguments_are_described_as_they_are_nested() -> None:
    inputs = (FRAMES, {"scale": torch.ones(3, 8)})
    captured = pipegraph.capture(Scaled(), inputs, dynamic_shapes=({1: "batch"}, {"scale": {0: "batch"}}))
    assert captured.sizes.captured == {"batch": 3}


@pytest.mark.parametrize(
    ("model", "inputs", "dynamic_shapes", "parts", "advice"),
    [
        (
            Steps(),
            (torch.zeros(3, 5, 8), torch.zeros(2, 7)),
            {"x": {1: "length"}},
            ["x.shape[1]", "always 5", "range(1"],
            "torch.export.Dim.AUTO",
        ),
        (Scaled(), (FRAMES,), {"frame": {1: "length"}}, ["'frame'", '"frames"'], "frames"),
        (Scaled(), (FRAMES,), {"frames": {3: "length"}}, ["{3: 'length'}", "3 dimensions"], "torch.export.Dim("),
        (Scaled(), (FRAMES,), ({}, {}), ["1 arguments"], "dynamic_shapes={"),
        (Scaled(), (FRAMES,), {"frames": {0: "a b"}}, ["frames.shape[0]", "'a b'"], "dynamic_shapes={"),
        (Scaled(), (FRAMES,), {"frames": {0: Dim("rows", max=4)}}, ["1 to 4", "example has 5"], "within the bounds"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: nn.Module, inputs: tuple[Tensor, ...], dynamic_shapes: Any, parts: list[str], advice: str
) -> None:
    with refused(CaptureError, "dynamic_shapes", *parts, advice=advice):
        pipegraph.capture(model, inputs, dynamic_shapes=dynamic_shapes)


def test_the_batch_varies_where_torch_cannot_let_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises an AssertionError if relative positions of a Conformer are dynamic; its batch may be dynamic."""
    original_export = torch_export._export

    def export(mode: Any, model: Any, args: Any, kwargs: Any, dtype: Any, fixed: Any, *options: bool) -> Any:
        if fixed is not None and (0, 1) not in fixed:
            raise AssertionError("Expected an equality constraint for s27")
        return original_export(mode, model, args, kwargs, dtype, fixed, *options)

    monkeypatch.setattr(torch_export, "_export", export)
    captured = pipegraph.capture(Scaled(), (FRAMES,))
    assert captured.sizes.captured == {"batch": 5}
    reasons = [size.reason for size in captured.sizes.fixed]
    assert reasons and all(reason.startswith("no size but the batch varies: AssertionError: Exp") for reason in reasons)
    with pytest.raises(CaptureError):  # what has to vary is not fixed
        pipegraph.capture(Scaled(), (FRAMES,), dynamic_shapes={"frames": {0: "batch", 1: "length"}})


class Windows(nn.Module):
    """Pads rows to whole windows of three, of which it shifts the elements, several times, and pools in between."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            length = x.shape[1]
            x = F.pad(x, (0, (3 - length % 3) % 3))
            x = (x.view(x.shape[0], x.shape[1] // 3, 3) * scale).flatten(1)[:, : length + length // 5]
            x = x[:, : x.shape[1] - x.shape[1] // 7]
        return x


def test_a_size_from_which_too_much_is_computed_is_fixed() -> None:
    captured = pipegraph.capture(Windows(12), (torch.randn(2, 64),))
    assert captured.sizes.captured == {"batch": 2}
    (fixed,) = captured.sizes.fixed
    assert (fixed.place, fixed.size) == ("x.shape[1]", 64)
    assert "test_dynamic_shapes.py" in fixed.line
    assert "cannot express" in fixed.reason
    assert set(pipegraph.capture(Windows(1), (torch.randn(2, 64),)).sizes.captured) == {"batch", "x_1"}


def test_but_not_if_it_has_to_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_expression_limit, "_LONGEST", 15)
    model, inputs = Windows(1), (torch.randn(2, 64),)
    assert set(pipegraph.capture(model, inputs).sizes.captured) == {"batch"}
    captured = pipegraph.capture(model, inputs, dynamic_shapes={"x": {0: "batch", 1: "length"}})
    assert set(captured.sizes.captured) == {"batch", "length"}


class Halvings(nn.Module):
    """Halves an image several times, and puts what comes out in one row, as detectors do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.Conv2d(3, 3, 3, 2, 1) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        feature_maps = []
        for down in self.downs:
            x = down(x)
            feature_maps.append(x.flatten(2))
        return torch.cat(feature_maps, 2)


def test_a_package_holds_every_expression_that_is_written(tmp_path: Path) -> None:
    captured = pipegraph.capture(Halvings(6), (torch.randn(2, 3, 32, 32),))
    folder = pipegraph.write_package(pipegraph.plan(captured, points=["downs.1"]), tmp_path / "package").path
    manifest = Package.open(folder).manifest
    (output,) = manifest.stages[-1].outputs
    assert len(str(manifest.values[output].shape[2])) > 300


def test_a_size_is_fixed_whose_expression_it_could_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert symbolic_size.LONGEST_TEXT == package_sizes.LONGEST_EXPRESSION
    monkeypatch.setattr(input_sizes, "LONGEST_TEXT", 150)
    assert len(pipegraph.capture(Halvings(2), (torch.randn(2, 3, 32, 32),)).sizes.captured) == 3
    assert pipegraph.capture(Halvings(3), (torch.randn(2, 3, 32, 32),)).sizes.captured == {"batch": 2}


def test_an_expression_is_too_long_by_the_number_of_its_parts() -> None:
    symbols = sympy.symbols("a:200", integer=True, positive=True)
    assert not is_long(sympy.Add(*symbols))
    assert is_long(sympy.Add(*(symbol * 2 for symbol in symbols)))


def test_a_line_that_fixes_a_size_is_one_of_the_model_and_not_of_who_captures_it() -> None:
    captured = pipegraph.capture(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.zeros(4, 8),))
    (fixed,) = captured.sizes.fixed
    assert (fixed.place, fixed.line) == ("input.shape[1]", "")
