"""Sizes that a model takes, though Python's ``int`` or a function of torch asks for a number."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipegraph
from pipegraph.errors import PackageError
from pipegraph.graph.captured import Captured
from pipegraph.graph.export.torch_export import IntOfSizeError, export
from pipegraph.graph.nodes import shape_of
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.package.sizes import evaluate


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.changed(self.first(x)))

    def changed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Half(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x[:, : max(1, int(x.shape[1] * 0.5))]


class Capacity(Part):
    def changed(self, x: Tensor) -> Tensor:
        assert isinstance(x.shape[0], int) and issubclass(bool, int)
        return x[:, : int(x.shape[1] / 2 + 0.75)]


class Rounded(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x[:, : round(x.shape[1] * 0.3)]


class Ceil(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x[:, : math.ceil(x.shape[1] / 4)]


class Floor(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x[:, math.floor(x.shape[1] / 4) :]


class Linspace(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x + torch.linspace(0, 1, x.shape[1])[:, None]


class Places(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x + torch.linspace(0, x.shape[1] - 1, x.shape[1])[:, None]


class HalfSteps(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x + torch.arange(0.5, x.shape[1])[:, None] / x.shape[1]


class LongSteps(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x + torch.arange(0.5, x.shape[1], 3).sum()


class Padded(Part):
    def changed(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        pad = (4 - length % 4) % 4
        chunks = F.pad(x, (0, 0, 0, pad)).reshape(x.shape[0], -1, 4, 8).cumsum(2)
        y = chunks.reshape(x.shape[0], -1, 8)
        return y[:, :length] if pad > 0 else y


class Chunks(Part):
    def changed(self, x: Tensor) -> Tensor:
        count = math.ceil(x.shape[1] / 4)
        return F.pad(x, (0, 0, 0, count * 4 - x.shape[1])).reshape(x.shape[0], count, 4, 8).mean(2)


SOURCE = {
    Half: "[:, : max(1, int(x.shape[1] * 0.5))]",
    Capacity: "int(x.shape[1] / 2 + 0.75)",
    Rounded: "round(x.shape[1] * 0.3)",
    Ceil: "math.ceil(x.shape[1] / 4)",
    Floor: "math.floor(x.shape[1] / 4)",
    Linspace: "torch.linspace(0, 1, x.shape[1]",
    Places: "torch.linspace(0, x.shape[1] - 1, x.shape[1]",
    HalfSteps: "torch.arange(0.5, x.shape[1]",
    LongSteps: "torch.arange(0.5, x.shape[1], 3)",
    Padded: "(4 - x.shape[1] % 4) % 4",
    Chunks: "math.ceil(x.shape[1] / 4)",
}


def captured(model: nn.Module, length: int) -> Captured:
    return pipegraph.capture(model, (torch.randn(3, length, 8),))


@pytest.mark.parametrize(("kind", "length"), [*((kind, 13) for kind in SOURCE), (Padded, 12), (Chunks, 12)])
def test_the_length_varies(kind: type[Part], length: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind()
    package = pipegraph.write_package(pipegraph.plan(captured(model, length), points=["last"]), tmp_path / "out")
    assert SOURCE[kind] in (tmp_path / "out" / "stage_0.py").read_text()
    pipe = pipegraph.Pipeline(package, kernels="eager", microbatches=2, loss_fn=lambda y, _: y.square().mean())
    for new_length in {12: (12, 13), 13: (13, 12, 29)}[length]:
        x = torch.randn(4, new_length, 8)
        model.zero_grad()
        for stage in pipe.stages.values():
            stage.zero_grad()
        expected = model(x)
        assert torch.allclose(pipe.eval(x), expected, atol=1e-6)
        pipe.step(x)
        expected.square().mean().backward()
        for name, parameter in model.named_parameters():
            gradient = next(tensors[name] for tensors in map(dict, _parameters(pipe)) if name in tensors).grad
            assert gradient is not None and parameter.grad is not None
            assert torch.allclose(gradient, parameter.grad, atol=1e-5), name


def _parameters(pipe: pipegraph.Pipeline) -> list[list[tuple[str, Tensor]]]:
    return [list(stage.named_parameters()) for stage in pipe.stages.values()]


def test_a_kernel_of_inductor_takes_another_length(tmp_path: Path) -> None:
    model = Linspace()
    package = pipegraph.write_package(pipegraph.plan(captured(model, 13), points=["last"]), tmp_path / "out")
    pipe = pipegraph.Pipeline(package, microbatches=1, loss_fn=lambda y, _: y.mean())
    for length in (13, 9):
        x = torch.randn(4, length, 8)
        assert torch.allclose(pipe.eval(x), model(x), atol=1e-5)


def test_the_files_of_the_model_are_left_as_they_were() -> None:
    captured(Half(), 13)
    assert "int" not in vars(sys.modules[__name__])
    assert torch.linspace.__module__ != "pipegraph.graph.export.kept_sizes"


class AsType(Part):
    """Asks for the type ``int`` where no size is."""

    def changed(self, x: Tensor) -> Tensor:
        counts = torch.zeros(8, dtype=int)  # type: ignore[call-overload]
        return x[:, : int(x.shape[1] * 0.5)] + counts


def test_a_model_that_needs_the_type_itself_is_captured_at_its_length() -> None:
    assert list(captured(AsType(), 13).sizes.captured) == ["batch"]


class OnlyMultiples(Part):
    def changed(self, x: Tensor) -> Tensor:
        if x.shape[1] % 4:
            x = F.pad(x, (0, 0, 0, 4 - x.shape[1] % 4), value=1.0)
        return x.reshape(x.shape[0], -1, 4, 8).mean(2)


@pytest.mark.parametrize(("length", "condition"), [(12, "x_1 % 4 == 0"), (13, "x_1 % 4 != 0")])
def test_a_branch_that_does_something_else_stays_a_condition(length: int, condition: str) -> None:
    assert condition in captured(OnlyMultiples(), length).sizes.conditions


class Combined(Part):
    """torch combines 0.3 * 0.7 in its expression, which is 63 of 300; Python takes 62."""

    def changed(self, x: Tensor) -> Tensor:
        return x[:, : int(x.shape[1] * 0.3 * 0.7)]


class CombinedSum(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x[:, : int((x.shape[1] * 0.3 + 0.1) * 0.7) - 1]


@pytest.mark.parametrize("kind", [Combined, CombinedSum])
def test_several_operations_that_round_fix_the_size(kind: type[Part]) -> None:
    limits = captured(kind(), 23).sizes
    assert list(limits.captured) == ["batch"]
    assert any("test_kept_sizes.py" in size.line and "int(" in size.line for size in limits.fixed)


class FloatBranch(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x.tanh() if x.shape[1] * 0.3 > 2.5 else x


def test_a_branch_on_a_fraction_fixes_the_size() -> None:
    assert list(captured(FloatBranch(), 13).sizes.captured) == ["batch"]


class EvenLength(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x[:, : int(math.ceil(x.shape[1] / 4) * 2)]


class ExactParts(Part):
    def changed(self, x: Tensor) -> Tensor:
        return x[:, : int((x.shape[1] / 4 + 0.75) * 1.5)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Half, lambda n: max(1, int(n * 0.5))),
        (Rounded, lambda n: round(n * 0.3)),
        (Ceil, lambda n: math.ceil(n / 4)),
        (EvenLength, lambda n: 2 * math.ceil(n / 4)),
        (ExactParts, lambda n: int((n / 4 + 0.75) * 1.5)),
    ],
)
def test_an_expression_is_the_number_of_the_model_at_every_length(
    kind: type[Part], expected: Callable[[int], int]
) -> None:
    size = next(
        dim
        for node in captured(kind(), 13).returned
        for dim in shape_of(node)
        if isinstance(dim, SymbolicSize) and "x_1" in dim.text
    )
    (symbol,) = size.symbols
    for length in range(2, 2000):
        assert size.at({symbol: length}) == evaluate(size.text, {"x_1": length}) == expected(length)


@pytest.mark.parametrize("kind", [Half, EvenLength])
def test_an_export_ends_at_an_int_of_sizes(kind: type[Part]) -> None:
    with pytest.raises(IntOfSizeError, match=r"test_kept_sizes\.py:\d+: .*int\("):
        export(kind(), (torch.randn(3, 13, 8),), {}, may_keep_int=True)


class Scaled(Part):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def changed(self, x: Tensor) -> Tensor:
        return x[:, : int(x.shape[1] * self.factor)]


@pytest.mark.parametrize("factor", [0.1, 0.29, 0.3, 0.7, 1 / 3])
def test_a_factor_rounds_as_it_does_in_python(factor: float) -> None:
    output = captured(Scaled(factor), 23).returned[0]
    size = shape_of(output)[1]
    assert isinstance(size, SymbolicSize)
    (symbol,) = size.symbols
    for length in range(2, 2000):
        assert size.at({symbol: length}) == evaluate(size.text, {"x_1": length}) == int(length * factor)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("int(n * 0.29)", int(100 * 0.29)),
        ("round(n * 0.3)", 30),
        ("math.ceil(n / 7)", 15),
        ("math.floor(n / 7)", 14),
        ("max(1, int(n * 0.001))", 1),
    ],
)
def test_a_size_is_computed_as_python_computes_it(text: str, value: int) -> None:
    assert evaluate(text, {"n": 100}) == value


@pytest.mark.parametrize("text", ["n / 2", "n * 0.5", "math.sqrt(n)", "float(n)", "int(n, 2)", "int(n / 0)"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(PackageError):
        evaluate(text, {"n": 10})
