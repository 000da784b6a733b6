"""The classes of custom autograd Functions in packages: their text, what they read, and what no package has."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.codegen.package_files import generate
from pipegraph.codegen.proof import differences_of_text
from pipegraph.errors import CaptureError
from tests.codegen.parity import differences, plan_of, source, split
from tests.messages import refused
from tests.models.custom_functions import Balanced, DomainClassifier, Mixed, Quantizer, halved, stack

ROUND = """
LEVELS = 5


def half_of(levels: int) -> float:
    return (levels - 1) / 2


class RoundStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        half = half_of(LEVELS)
        return (torch.tanh(x) * half).round() / half  # between -1 and 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * half_of(LEVELS)


class Quantizer(nn.Module):
"""


def test_a_package_has_the_text_of_a_function_and_of_what_it_reads(tmp_path: Path) -> None:
    model, x = stack(Quantizer), torch.randn(3, 5, 8)
    package = split(tmp_path, model, (x,), cut="2")
    assert ROUND in source(package)
    assert "return self.decode(RoundStraightThrough.apply(self.encode(x)))" in source(package)
    assert differences(package, model, (x,)) == []


@pytest.mark.usefixtures("from_graph")
def test_numbers_are_the_attributes_of_the_source(tmp_path: Path) -> None:
    model, x = stack(DomainClassifier), torch.randn(3, 5, 8)
    package = split(tmp_path, model, (x,), cut="2")
    assert "ReverseGradient.apply(F.relu(self.features(x)), self.strength)" in source(package)
    assert differences(package, model, (x,)) == []


@pytest.mark.parametrize("kind", [Quantizer, DomainClassifier, Balanced, Mixed])
@pytest.mark.parametrize("train", [True, False])
def test_a_package_imports_torch_alone_and_is_the_model(kind: type[nn.Module], train: bool, tmp_path: Path) -> None:
    model, x = stack(kind), torch.randn(3, 5, 8)
    package = split(tmp_path, model, (x,), cut="2")
    tree = ast.parse((package.path / "blocks.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {alias.name if isinstance(node, ast.Import) else node.module for node in imports for alias in node.names}
    assert {str(module).split(".")[0] for module in modules} <= {"torch", "typing"}
    assert differences(package, model, (x,), train=train) == []
    other = torch.randn(7, 4, 8)
    expected = model.train(train)(other)
    for index in range(2):
        other = package.load_stage(index).train(train)(other)
    torch.testing.assert_close(other, expected)


def test_stages_in_bfloat16_are_the_model_in_bfloat16(tmp_path: Path) -> None:
    model, x = stack(Balanced), torch.randn(3, 5, 8).bfloat16()
    package = split(tmp_path, model, (x.float(),), cut="2")
    y = package.load_stage(1).bfloat16()(package.load_stage(0).bfloat16()(x))
    torch.testing.assert_close(y, model.bfloat16()(x))


MODEL = """
import torch
from torch import nn


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Round.apply(self.linear(x)), Round.apply(x)


class Last(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]
"""


def test_the_text_does_not_depend_on_what_was_captured_before(tmp_path: Path) -> None:
    (tmp_path / "rounding.py").write_text(MODEL)
    texts = []
    for _ in range(2):
        spec = importlib.util.spec_from_file_location("rounding", tmp_path / "rounding.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        package = split(tmp_path, nn.Sequential(module.Layer(), module.Last()), (torch.randn(3, 4),), cut="1")
        texts.append({path.name: path.read_bytes() for path in package.path.glob("*.[pj]*")})
    assert texts[0] == texts[1]


def rounded(x: Tensor) -> Tensor:
    scaled = x * 3
    return Outer.apply(scaled, x.shape[-1], (1, 2), None, torch.float32, "floor") / 3


class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.floor()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Outer(torch.autograd.Function):
    """Takes arguments of all kinds, and calls another Function."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, pair: np.ndarray, mask: None, dtype: torch.dtype, mode: str) -> Any:
        """Has a docstring, and annotations of NumPy."""
        assert pair == (1, 2) and mask is None and mode == "floor"
        ctx.width = width
        return Inner.apply(x).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient * ctx.width * Outer.factor, None, None, None, None, None


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return rounded(self.linear(x))


def test_functions_that_call_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outer, "factor", 0.5)
    model, x = nn.Sequential(Helped(), Helped()), torch.randn(3, 4)
    package = split(tmp_path, model, (x,), cut="1")
    text = source(package)
    assert "class Inner(" in text and text.index("class Inner(") < text.index("class Outer(")
    assert "factor = 0.5" in text and "docstring" not in text and "np." not in text
    assert "(ctx: Any, x: Tensor, width: int, pair, mask: None, dtype: torch.dtype, mode: str) -> Any:" in text
    assert differences(package, model, (x,)) == []


# ---- what no package has ---------------------------------------------------------------------------------------------


class WithNumPy(Inner):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(np.sqrt(4.0))


class WithTensor(Inner):
    scale = torch.ones(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * WithTensor.scale


class WithImport(Inner):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        import math

        return gradient * math.pi


def scaled(gradient: Tensor) -> Tensor:
    return gradient * FACTOR


FACTOR = 2.0


class WithTwo(Inner):
    """Reads a function of another file whose FACTOR is another number."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return scaled(halved(gradient)) * FACTOR


class WithPrint(Inner):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        print(gradient.shape)
        return gradient


class Layer(Inner):
    """Has the name of a module of the model, below."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


NAMESAKE = Layer


class Layer(nn.Module):  # type: ignore[no-redef]
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.linear(x))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (WithNumPy, "reads np"),
        (WithTensor, "scale of its class"),
        (WithImport, "imports a module"),
        (WithPrint, "uses print"),
        (WithTwo, "FACTOR is two things"),
        (NAMESAKE, "means something else"),
    ],
)
def test_what_no_package_has_is_refused_before_anything_is_written(function: Any, reason: str, tmp_path: Path) -> None:
    model = nn.Sequential(Layer(function), Layer(function))
    plan = plan_of(model, (torch.randn(3, 4),), cut="1")
    with refused(CaptureError, function.__name__, reason, "test_custom_functions.py:", advice="register_autograd"):
        pipegraph.write_package(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("correct", "wrong"),
    [
        ("return gradient * half_of(LEVELS)", "return gradient"),
        ("LEVELS = 5", "LEVELS = 7"),
        (".round() / half", ".floor() / half"),
        ("half = half_of(LEVELS)", "half = half_of(LEVEL)"),
        ("RoundStraightThrough.apply(self.encode(x))", "self.encode(x)"),
    ],
)
def test_a_fault_in_the_written_function_is_found(correct: str, wrong: str) -> None:
    plan = plan_of(stack(Quantizer), (torch.randn(3, 5, 8),), cut="2")
    files = generate(plan).files
    assert differences_of_text(files, [plan]) == []
    assert correct in files["blocks.py"]
    faulty = {**files, "blocks.py": files["blocks.py"].replace(correct, wrong)}
    assert differences_of_text(faulty, [plan]) != []


class Switched(nn.Module):
    """Hands its mode to a Function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return ByMode.apply(self.linear(x), self.training)


class ByMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
        return x.round() if training else x.floor()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@pytest.mark.parametrize("train", [True, False])
def test_a_function_that_follows_the_mode(train: bool, tmp_path: Path) -> None:
    model, x = nn.Sequential(Switched(), Switched()), torch.randn(3, 4)
    assert differences(split(tmp_path, model, (x,), cut="1"), model, (x,), train=train) == []


class InStage(nn.Module):
    """Applies Functions outside of its children: to its input, without gradients, and to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(Inner.apply(x) + x)
        with torch.no_grad():
            level = Inner.apply(x.abs())
        return self.second(x * level) * Inner.apply(self.scale)


@pytest.mark.parametrize("train", [True, False])
def test_a_stage_applies_functions_itself(train: bool, tmp_path: Path) -> None:
    model, x = InStage(), torch.randn(3, 4)
    package = split(tmp_path, model, (x,), cut="second")
    for index in range(2):
        assert "from .blocks import Inner" in (package.path / f"stage_{index}.py").read_text(encoding="utf-8")
    assert differences(package, model, (x,), train=train) == []
