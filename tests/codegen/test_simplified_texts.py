"""Texts of functions without what they do in vain after they were cut to what ran."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipegraph.codegen.author_text.cut import TextLine
from pipegraph.codegen.author_text.headers import without_parameters
from pipegraph.codegen.author_text.simplify import CalledFunctions
from pipegraph.graph.captured import ExecutedLines
from tests.codegen.parity import assert_equal_at_every_size, differences, source, split


def lines_of(text: str) -> list[TextLine]:
    return [TextLine(line, number) for number, line in enumerate(textwrap.dedent(text).strip().splitlines(), 1)]


def simplified(text: str, **constants: bool | None) -> str:
    function = simplified
    assert isinstance(function, FunctionType)
    code = function.__code__
    executed = ExecutedLines({}, {}, constants={(code.co_filename, code.co_firstlineno): constants})
    return "\n".join(line.text for line in CalledFunctions(executed).simplified(lines_of(text), function))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            """
            def f(x):
                count = 0
                is_npu = x.device.type == "npu"
                unused = x.shape[0]
                count += 1
                drawn = random()
                return x
            """,
            "def f(x):\n    count = 0\n    count += 1\n    drawn = random()\n    return x",
            id="what nothing reads",
        ),
        pytest.param(
            """
            def f(x):
                # The state is None without a cache.
                state = None

                state = x.sum()
                return state
            """,
            "def f(x):\n    state = x.sum()\n    return state",
            id="overwritten, with its comment",
        ),
        pytest.param(
            """
            def f(x):
                # Two numbers.
                scale = None
                scale = 2.0
                return x * scale
            """,
            "def f(x):\n    # Two numbers.\n    scale = 2.0\n    return x * scale",
            id="the comment of a group stays",
        ),
        pytest.param(
            """
            def f(x):
                _, state = None, None
                _, length = x.shape
                return g(x, state, length)
            """,
            "def f(x):\n    state = None\n    _, length = x.shape\n    return g(x, state, length)",
            id="a constant of two",
        ),
        pytest.param(
            """
            def f(x, flag):
                scale = None
                if flag:
                    scale = 2.0
                return x if scale is None else x * scale
            """,
            "def f(x, flag):\n    scale = None\n    if flag:\n        scale = 2.0\n"
            "    return x if scale is None else x * scale",
            id="overwritten in one branch only",
        ),
        pytest.param(
            """
            def f(x):
                total = None
                for row in x:
                    total = row if total is None else total + row
                return total
            """,
            "def f(x):\n    total = None\n    for row in x:\n        total = row if total is None else total + row\n"
            "    return total",
            id="read in a loop before it is assigned",
        ),
    ],
)
def test_statements_in_vain_are_left_out(text: str, expected: str) -> None:
    assert simplified(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            """
            def f(x, cache=None):
                # What was seen before
                seen = cache.length() if cache is not None else 0

                return torch.arange(x.shape[1]) + seen
            """,
            "def f(x, cache=None):\n    return torch.arange(x.shape[1])",
            id="an argument that is always None",
        ),
        pytest.param(
            """
            def f(x, flag, other=None):
                is_cross = other is not None
                source = other if is_cross else x
                return source * 2 if not flag else source
            """,
            "def f(x, flag, other=None):\n    source = x\n    return source",
            id="variables that follow from it",
        ),
        pytest.param(
            """
            def f(x, state=None):
                states = (
                    state[:, None].to(x.dtype)
                    if state is not None
                    else torch.zeros_like(x)
                )
                return x + states
            """,
            "def f(x, state=None):\n    states = torch.zeros_like(x)\n    return x + states",
            id="on several lines",
        ),
        pytest.param(
            """
            def f(x, cache=None):
                if cache is not None and x.ndim > 2 or x.ndim > 3:
                    x = x[0]
                is_plain = not (cache is not None and x.ndim > 2)
                return x if is_plain else -x
            """,
            "def f(x, cache=None):\n    if cache is not None and x.ndim > 2 or x.ndim > 3:\n        x = x[0]\n"
            "    return x",
            id="a condition of several parts is decided as a whole or not at all",
        ),
        pytest.param(
            """
            def f(x, flag):
                start = 0
                return (x if x.ndim else x[None]) + start, x + start, x + flag
            """,
            "def f(x, flag):\n    start = 0\n    return (x if x.ndim else x[None]) + start, x, x + flag",
            id="nothing is added",
        ),
        pytest.param(
            """
            def f(x, state=None):
                state = g(x)
                return (x if state is None else state), map(lambda cache: cache is None, x)
            """,
            "def f(x, state=None):\n    state = g(x)\n"
            "    return (x if state is None else state), map(lambda cache: cache is None, x)",
            id="not if something else is assigned",
        ),
    ],
)
def test_expressions_that_constants_decide_have_one_side(text: str, expected: str) -> None:
    assert simplified(text, cache=None, other=None, state=None, flag=True) == expected


def test_a_parameter_is_left_out_with_its_description() -> None:
    lines = lines_of(
        '''
        def f(x, scale: float = 1.0, is_real=False):
            """Do something.

            Args:
                x: a tensor.
                scale (`float`, *optional*):
                    A factor.
                is_real: of complex numbers.
            Returns:
                another one.
            """
            return x
        '''
    )
    text = [line.text for line in without_parameters(lines, {"scale", "is_real"})]
    assert text == [
        "def f(x):",
        '    """Do something.',
        "",
        "    Args:",
        "        x: a tensor.",
        "    Returns:",
        "        another one.",
        '    """',
        "    return x",
    ]


def apply_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Nothing without a mask."""
    if mask is not None:
        x = x * mask
    return x


def fused(x: Tensor, weight: Tensor, interleaved: bool = False, **kwargs: float) -> Tensor | None:
    """Only where a library has a kernel for it."""
    if interleaved:
        return x @ weight
    return None


def table(x: Tensor, theta: float, interleaved: bool = False, dim: int = 2) -> Tensor:
    positions = torch.arange(x.shape[1], device=x.device) * theta
    if interleaved:
        positions = positions.repeat_interleave(2)
    if dim == 2:
        return x + positions[None, :, None]
    return x + positions


class Mixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        settings = {"limit": 2.0}
        x = apply_mask(x, mask)
        out = fused(x, self.inner.weight.transpose(0, 1), interleaved=False, **settings)
        if out is not None:
            return out
        hidden = apply_mask(self.inner(x), mask)
        hidden = table(hidden, 0.1, dim=2, interleaved=False)
        return x + self.outer(F.silu(hidden))


class Mixers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixer(8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_calls_that_do_nothing_and_arguments_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    model, x = Mixers(), torch.randn(4, 5, 8)
    package = split(tmp_path, model, (x,))
    text = source(package)
    assert "apply_mask" not in text
    assert "fused" not in text
    assert "settings" not in text
    assert "def table(x: Tensor, theta: float) -> Tensor:" in text
    assert "hidden = self.inner(x)" in text
    assert "hidden = table(hidden, 0.1)" in text
    assert not differences(package, model, (x,))
    assert_equal_at_every_size(package, model, (2, 7, 8))


class Masked(nn.Module):
    """A mask that is there in one layer alone: its function does something."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mixer(8), Mixer(8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.second(self.first(x), mask)


def test_a_function_that_does_something_once_is_called_everywhere(tmp_path: Path) -> None:
    model, x, mask = Masked(), torch.randn(4, 5, 8), torch.rand(4, 5, 1)
    package = split(tmp_path, model, (x, mask), cut="second")
    assert "apply_mask(" in source(package)
    assert not differences(package, model, (x, mask))
