"""Parameters that nothing reads after texts were cut, and the arguments that calls pass for them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegraph.codegen.classes.unused_parameters import without_unused_parameters
from pipegraph.codegen.syntax.expressions import Argument, FunctionCall, Name
from pipegraph.codegen.syntax.statements import Assign, ClassSource, FunctionSource, SourceText
from tests.codegen.parity import assert_equal_at_every_size, differences, source, split

STAGE = """
def forward(self, x, unread):
    {call}
    return x
"""


def text_of(text: str) -> SourceText:
    functions = [f"def {part}".strip() for part in textwrap.dedent(text).strip().split("\ndef ")]
    functions[0] = functions[0].removeprefix("def ")
    lines = [line for function in functions for line in function.split("\n")]
    return SourceText(tuple(functions), places=tuple(("model.py", at) for at, _ in enumerate(lines, 1)))


def block(name: str, text: str, **children: str) -> ClassSource:
    init = tuple(Assign((Name(f"self.{attribute}"),), FunctionCall(Name(of), ())) for attribute, of in children.items())
    return ClassSource(name, "", init=init, forward=(text_of(text),))


def changed(call: str, *blocks: ClassSource, functions: str = "") -> dict[str, tuple[str, ...]]:
    """The texts of a package whose stage calls ``self.inner``, by class and function."""
    sources = [FunctionSource("helper", text_of(functions))] if functions else []
    stage = block("Stage0", STAGE.format(call=call), inner=blocks[-1].name)
    new_functions, new_blocks, new_stages = without_unused_parameters(sources, blocks, [stage])
    texts = {source.name: source.author_text for source in (*new_functions, *new_blocks, *new_stages)}
    for text in texts.values():
        assert text is not None
        lines = [line for function in text.functions for line in function.split("\n")]
        assert len(text.places) == len(lines)
    return {name: text.functions for name, text in texts.items() if text is not None}


@pytest.mark.parametrize(
    ("forward", "call", "expected", "expected_call"),
    [
        pytest.param(
            "def forward(self, x, mask=None, *args, scale=1.0, **kwargs):\n    return x * scale",
            "x = self.inner(x, scale=2.0)",
            "def forward(self, x, scale=1.0):\n    return x * scale",
            "x = self.inner(x, scale=2.0)",
            id="nobody passes them",
        ),
        pytest.param(
            "def forward(self, x, mask, scale):\n    return x * scale",
            "x = self.inner(x, x.float(), scale=2.0)",
            "def forward(self, x, scale):\n    return x * scale",
            "x = self.inner(x, scale=2.0)",
            id="a call passes them",
        ),
        pytest.param(
            "def forward(self, x, mask, scale):\n    return x * scale",
            "x = self.inner(x, self.draw(x), scale=2.0)",
            "def forward(self, x, mask, scale):\n    return x * scale",
            "x = self.inner(x, self.draw(x), scale=2.0)",
            id="an argument that does something",
        ),
        pytest.param(
            "def forward(self, x, mask=None, **kwargs):\n    return x",
            "x = self.inner(x, **unread)",
            "def forward(self, x, mask=None, **kwargs):\n    return x",
            "x = self.inner(x, **unread)",
            id="a dict of which nothing is known",
        ),
        pytest.param(
            "def forward(self, x, mask=None, bias=None):\n    del mask\n    return x",
            "x = self.inner(*unread)",
            "def forward(self, x, mask=None, bias=None):\n    del mask\n    return x",
            "x = self.inner(*unread)",
            id="a list of which nothing is known",
        ),
        pytest.param(
            "def forward(self, x, mask=None):\n    return x",
            "x = checkpoint(self.inner, x, unread)",
            "def forward(self, x, mask=None):\n    return x",
            "x = checkpoint(self.inner, x, unread)",
            id="a function calls the module",
        ),
        pytest.param(
            "def forward(self, x, options=None):\n    options = options or {}\n    return self.project(x, **options)\n"
            "def project(self, x, bias=None):\n    return x",
            "x = self.inner(x)",
            "def forward(self, x):\n    return self.project(x)",
            "x = self.inner(x)",
            id="options that nobody passes",
        ),
        pytest.param(
            "def forward(self, x, options=None):\n    options = options or {}\n    return self.project(x, **options)\n"
            "def project(self, x, bias=None):\n    return x if bias is None else x + bias",
            "x = self.inner(x, dict(bias=x))",
            "def forward(self, x, options=None):\n    options = options or {}\n    return self.project(x, **options)",
            "x = self.inner(x, dict(bias=x))",
            id="options that a call passes",
        ),
        pytest.param(
            "def forward(self, x, mask=None):\n    return (lambda: x if mask is None else x * mask)()",
            "for module in [self.inner]:\n        x = module(x)",
            "def forward(self, x, mask=None):\n    return (lambda: x if mask is None else x * mask)()",
            "for module in [self.inner]:\n        x = module(x)",
            id="a function inside reads it",
        ),
    ],
)
def test_parameters_and_arguments(forward: str, call: str, expected: str, expected_call: str) -> None:
    texts = changed(call, block("Inner", forward))
    assert texts["Inner"][0] == expected
    assert texts["Stage0"] == (STAGE.format(call=expected_call).strip(),)


def test_an_argument_that_is_only_passed_on_is_unused() -> None:
    inner = block("Inner", "def forward(self, x, mask=None, **kwargs):\n    return helper(x, **kwargs)")
    outer = block(
        "Outer",
        """
        def forward(self, x, mask=None, cache=None, **kwargs):
            x = self.inner(
                x,
                mask=mask,
                **kwargs,
            )
            return self.projected(x, cache)
        def projected(self, x, cache):
            return x
        """,
        inner="Inner",
    )
    texts = changed(
        "x = self.inner(x, mask=unread, cache=unread, layer=3)",
        inner,
        outer,
        functions="def helper(x, activation=None, **kwargs):\n    return x",
    )
    assert texts["helper"] == ("def helper(x):\n    return x",)
    assert texts["Inner"] == ("def forward(self, x):\n    return helper(x)",)
    assert texts["Outer"] == (
        "def forward(self, x):\n    x = self.inner(x)\n    return self.projected(x)",
        "def projected(self, x):\n    return x",
    )
    assert texts["Stage0"] == ("def forward(self, x, unread):\n    x = self.inner(x)\n    return x",)


def test_a_method_that_another_class_calls_keeps_its_parameters() -> None:
    inner = block(
        "Inner", "def forward(self, x):\n    return self.project(x)\ndef project(self, x, mask=None):\n    return x"
    )
    texts = changed("x = self.inner(self.inner.project(x, unread))", inner)
    assert texts["Inner"][1] == "def project(self, x, mask=None):\n    return x"


def test_a_loop_over_two_classes_passes_what_either_reads() -> None:
    first = block("First", "def forward(self, x, mask=None, bias=None):\n    return x * mask")
    second = block("Second", "def forward(self, x, mask=None, bias=None):\n    return x")
    stack = ClassSource(
        "Stack",
        "",
        init=(
            Assign(
                (Name("self.layers"),), FunctionCall(Name("nn.ModuleList"), (Argument(Name("[First(), Second()]")),))
            ),
        ),
        forward=(
            text_of(
                "def forward(self, x, mask):\n    for index, layer in enumerate(self.layers):\n"
                "        x = layer(x, mask=mask, bias=index)\n    return x"
            ),
        ),
    )
    texts = changed("x = self.inner(x, unread)", first, second, stack)
    assert texts["First"] == ("def forward(self, x, mask=None):\n    return x * mask",)
    assert texts["Second"] == ("def forward(self, x, mask=None):\n    return x",)
    assert "x = layer(x, mask=mask)" in texts["Stack"][0]


# ---- packages --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, cache: Any = None, use_cache: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        scores = x @ x.transpose(1, 2)
        if mask is not None:
            scores = scores + mask
        return self.project(scores.softmax(-1) @ x), cache


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None, use_cache: bool = False, **kwargs: Any) -> Tensor:
        hidden, _ = self.attention(x, mask=mask, cache=None, use_cache=use_cache, **kwargs)
        return self.norm(x + hidden)


class Layers(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.layers = nn.ModuleList([Layer(8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            mask = x[:, :, :1] if self.masked and at == 1 else None
            x = layer(x, mask=mask, use_cache=True, position=at)
        return x


@pytest.mark.parametrize("masked", [False, True])
def test_a_package_has_no_parameters_that_nothing_reads(tmp_path: Path, masked: bool) -> None:
    model, x = Layers(masked), torch.randn(4, 5, 8)
    package = split(tmp_path, model, (x,))
    text = source(package)
    assert "kwargs" not in text
    assert "use_cache" not in text
    assert ("mask: Tensor | None = None" in text) == masked
    assert not differences(package, model, (x,))
    assert_equal_at_every_size(package, model, (2, 7, 8))
