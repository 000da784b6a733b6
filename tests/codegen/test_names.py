"""Whatever a model's names hold: the source compiles, means them, and runs nothing that stands in them."""

from __future__ import annotations

import ast
import builtins
import keyword
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipegraph.codegen.names.identifiers import class_name, variable
from pipegraph.codegen.names.model_names import prose
from pipegraph.codegen.names.source_statements import SourceStatement
from tests.codegen.layers import Block, batch
from tests.codegen.parity import differences, source, split

PAYLOAD = "__import__('builtins').hostile.append(1)"
HOSTILE = [
    f'"""\n{PAYLOAD}\n"""',
    f"'''{PAYLOAD}'''",
    f'"); {PAYLOAD}; ("',
    f"\\\n{PAYLOAD}",
    f"{{{{ {PAYLOAD} }}}}",
    f"{{% raw %}}{PAYLOAD}",
    f"x\r\n{PAYLOAD}\x00\u2028\x85",
    "\\N{BULLET}",
    "\\",
    '"',
    "'\"",
    "w*",
    "*",
    "w?",
    "[ab]",
    "w**",
    "^(a+)$",
    "%s",
    "$HOME",
    "{0}",
    "a-b",
    "😀",
    "é",
    "ﬁ",
    "",
    " ",
    "1",
    "01",
    "02",
    "¹",
    "٣",
    "__x",
    "__x__",
    "_",
    *keyword.kwlist,
    *keyword.softkwlist,
    "self",
    "torch",
    "nn",
    "F",
    "x",
    "Stage0",
    "l",
]
TEXT = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=12)).filter(lambda name: max(name, default=" ") < "\ud800")


class Hostile(nn.Module):
    """One of everything under the names that it is given; it returns a dict with them as keys."""

    def __init__(self, modules: list[str], states: list[str], keys: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Block()
        self.inner = nn.ModuleDict()
        for name in modules:
            if name and "." not in name and not hasattr(self.inner, name):
                self.inner.add_module(name, Block())
        for index, name in enumerate(states):
            if name and "." not in name and not hasattr(self, name):
                if index % 2:
                    self.register_buffer(name, torch.randn(8), persistent=bool(index % 4 == 1))
                else:
                    self.register_parameter(name, nn.Parameter(torch.randn(8)))
        self.head = nn.Linear(8, 8)
        self.keys = keys

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for module in self.inner.values():
            x = module(x)
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            x = x * tensor
        x = self.head(x)
        return {key: x + index for index, key in enumerate(self.keys)} or {"x": x}


NAMES = st.lists(TEXT, max_size=4, unique=True)


@pytest.mark.slow
@given(NAMES, NAMES, NAMES)
@example(HOSTILE[:9], HOSTILE[:9], HOSTILE[:9])
@example(HOSTILE[9:30], HOSTILE[9:30], HOSTILE[9:30])
@example(HOSTILE[30:], HOSTILE[30:], HOSTILE[30:])
@settings(
    max_examples=8,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking would take minutes
    suppress_health_check=[HealthCheck.too_slow],
)
def test_any_names(modules: list[str], states: list[str], keys: list[str]) -> None:
    builtins.hostile = []  # type: ignore[attr-defined]
    model = Hostile(modules, states, keys)
    with tempfile.TemporaryDirectory() as folder:
        package = split(Path(folder), model, (batch(),), cut="head")
        faults = [line for line in differences(package, model, (batch(),)) if "B009" not in line]
        assert faults == []
        assert all(not line.strip().startswith(PAYLOAD) for line in source(package).splitlines())
    assert builtins.hostile == []  # type: ignore[attr-defined]


ARGUMENTS = (
    "float, range, getattr, str, super, nn, torch, F, _, __, é, print, l, O, I, type, match, case, slice, aten, x_1"
)


def test_arguments_that_shadow_what_the_source_uses(tmp_path: Path) -> None:
    names = ARGUMENTS.split(", ")
    scope: dict[str, Any] = {}
    exec(f"def forward(self, {ARGUMENTS}):\n return self.b(self.a({names[0]}) + {' + '.join(names[1:10])}) + "
         f"{' + '.join(names[10:])}", scope)  # fmt: skip
    model_class = type("Model", (nn.Module,), {"forward": scope["forward"]})
    model = model_class()
    model.a, model.b = Block(), Block()
    inputs = tuple(batch() + index for index in range(len(names)))
    assert differences(split(tmp_path, model, inputs, cut="b"), model, inputs) == []


def test_classes_of_any_name(tmp_path: Path) -> None:
    """Also of the name of a stage, of what the source imports, and of each other."""
    functions = [torch.tanh, torch.sin, torch.cos, torch.erf, torch.sigmoid, torch.atan, torch.sinh, torch.relu]
    names = ["class", f'A"""\n{PAYLOAD}', "nn", "Stage0", "Stage0", "Linear", "Path", "É", "super", "Stage1"]
    builtins.hostile = []  # type: ignore[attr-defined]
    layers = []
    for name, function in zip(names, functions * 2, strict=False):
        forward = lambda self, x, function=function: function(self.linear(x))  # noqa: E731
        layers.append(type(name, (Block,), {"forward": forward})())
    model = nn.Sequential(*layers, nn.Linear(8, 8))
    assert differences(split(tmp_path, model, (batch(),), cut="4"), model, (batch(),)) == []
    assert builtins.hostile == []  # type: ignore[attr-defined]


@given(st.text())
def test_a_variable_is_an_identifier_that_shadows_nothing(text: str) -> None:
    name = variable(text, "x")
    assert name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    assert name not in {"torch", "nn", "F", "self", "float", "getattr", "str", "range"}


@given(st.text())
def test_a_class_name_is_an_identifier(text: str) -> None:
    assert class_name(text).isidentifier() and not keyword.iskeyword(class_name(text))


@given(st.text())
def test_prose_ends_no_docstring(text: str) -> None:
    assert isinstance(ast.literal_eval(f'"""{prose(text)}"""'), str)
    assert "\n" not in prose(text) and '"' not in prose(text)


def test_a_library_whose_name_begins_like_torch_is_not_torch() -> None:
    """Frames of torchvision are lines of a model's own source."""
    folder = Path(torch.__file__).parent
    statements = [
        SourceStatement(file, 1, 1, ("x",), frozenset(), False, ast.Pass())
        for file in (f"{folder}/nn/functional.py", f"{folder}vision/models/resnet.py")
    ]
    assert [statement.is_of_torch for statement in statements] == [True, False]


class Turned(nn.Module):
    """A layer that takes the tables of all layers as one tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = tables
        return self.linear(x) * cos + x * sin


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Turned() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        angles = self.angles(x)
        tables = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, tables)
        return x


def test_parts_of_a_tuple_have_the_names_of_those_who_unpack_it(tmp_path: Path) -> None:
    package = split(tmp_path, Tables(), (torch.randn(3, 5, 8),), cut="layers.2")
    assert {"cos", "sin"} <= set(package.manifest.stages[1].inputs)
