"""Expressions and statements as data: their text, their brackets, their line breaks."""

from __future__ import annotations

import ast
import math
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.codegen.names.identifiers import is_plain
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Binary,
    Expression,
    Name,
    Template,
    attribute,
    call,
    literal,
    string,
    unary,
)
from pipegraph.codegen.syntax.line_breaks import reads_well, wrap
from pipegraph.codegen.syntax.statements import Assign, Evaluate, For, If, lines, nested

X, Y = Name("x"), Name("y")
SYMBOLS = ("+", "-", "*", "/", "@", "%", "**", "&", "|", "^", "==", "<")


@given(
    st.recursive(
        st.sampled_from([X, Y, literal(2), literal(-3), literal(0.5)]),
        lambda inner: st.builds(Binary, st.sampled_from(SYMBOLS), inner, inner) | st.builds(unary, st.just("-"), inner),
        max_leaves=6,
    )
)
def test_brackets_keep_the_structure(expression: Expression) -> None:
    """Python reads the text as it reads the same text with brackets everywhere."""

    def bracketed(node: Expression) -> str:
        if isinstance(node, Binary):
            return f"({bracketed(node.left)} {node.symbol} {bracketed(node.right)})"
        return f"(-{bracketed(node.operands[0])})" if isinstance(node, Template) else f"({node.text})"

    assert ast.dump(ast.parse(expression.text)) == ast.dump(ast.parse(bracketed(expression)))


def test_equal_numbers_of_different_types_are_different_literals() -> None:
    assert len({literal(1), literal(True), literal(1.0)}) == 3
    assert literal(-0.0) != literal(0.0)


def test_statements_nest() -> None:
    context, inner = call("torch.no_grad"), call("torch.enable_grad")
    step = Assign((X,), call("f", X))
    statements = [((), step), ((context,), step), ((context, inner), step), ((), Evaluate(Y))]
    assert lines(nested(statements), 0) == [
        "x = f(x)",
        "with torch.no_grad():",
        "    x = f(x)",
        "    with torch.enable_grad():",
        "        x = f(x)",
        "y",
    ]
    loop = For(("i",), call("range", literal(3)), (If(Name("i"), (step,), (Evaluate(Y),)),))
    assert loop.lines(4) == [
        "    for i in range(3):",
        "        if i:",
        "            x = f(x)",
        "        else:",
        "            y",
    ]


@given(st.text())
def test_a_string_literal_is_the_string(text: str) -> None:
    assert ast.literal_eval(string(text).text) == text
    assert string(text).text.isascii() and string(text).text.isprintable()


@given(st.floats())
def test_a_float_literal_is_the_float(value: float) -> None:
    number = eval(literal(value).text, {"float": float})
    assert (
        math.isnan(number)
        if math.isnan(value)
        else number == value and math.copysign(1, number) == math.copysign(1, value)
    )


def test_a_float_of_numpy_is_written_as_a_number() -> None:
    assert literal(np.float64(0.25)).text == "0.25"


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("norm", "self.norm"),
        ("class", 'getattr(self, "class")'),
        ("0", 'getattr(self, "0")'),
        ("a b", 'getattr(self, "a b")'),
        ("__x", 'getattr(self, "__x")'),  # mangled inside a class
        ("__x__", "self.__x__"),
        ('"', "getattr(self, '\"')"),
        ("é", "self.é"),
        ("ﬁ", 'getattr(self, "\\ufb01")'),  # Python would read it as fi
    ],
)
def test_attribute(name: str, expression: str) -> None:
    assert attribute(SELF, name).text == expression
    assert is_plain(name) == expression.startswith("self.")
    assert not is_plain(name) or unicodedata.normalize("NFKC", name) == name


def test_a_row_of_operators_or_methods_goes_into_brackets() -> None:
    name = "a_rather_long_name_for_a_value"
    row = " + ".join(f"operand_number_{number}" for number in range(6))
    assert wrap(f"{name} = {row}", 0) == [f"{name} = (", f"    {row}", ")"]
    longer = [f"operand_number_{number}" for number in range(8)]
    assert wrap(f"return {' + '.join(longer)}", 0) == [
        "return (",
        f"    {longer[0]}",
        *(f"    + {operand}" for operand in longer[1:]),
        ")",
    ]
    methods = "values.reshape(1, 12, 128, 16).transpose(1, 2).contiguous().reshape(1, 128, 192).softmax(-1)"
    assert wrap(f"{name} = {methods}", 0) == [f"{name} = (", f"    {methods}", ")"]


def test_a_value_that_ends_in_a_bracket_is_broken_there() -> None:
    name, arguments = "a_rather_long_name_for_a_value", ", ".join(f"argument_number_{number}" for number in range(5))
    assert wrap(f"{name} = x + f({arguments})", 0) == [f"{name} = x + f(", f"    {arguments}", ")"]
    assert wrap(f"{name} = f({arguments}).sum(0)", 0) == [f"{name} = f(", f"    {arguments}", ").sum(0)"]


@pytest.mark.parametrize(
    ("value", "well"),
    [("f({})", True), ("f({}).view(2).sum(0)", True), ("f({}).sum(0)", False), ("x + f({})", True)],
)
def test_a_line_reads_well_if_no_method_follows_its_break(value: str, well: bool) -> None:
    text = value.format(", ".join(f"argument_number_{number}" for number in range(5)))
    assert reads_well(f"a_rather_long_name_for_a_value = {text}", 8) == well
    assert reads_well(f"x = {value.format('y')}", 8)


def test_a_comprehension_inside_an_element_stays_there() -> None:
    inner = "nn.ModuleList([Attention(width=16, heads=4, dropout=0.1) for _ in range(2)])"
    line = f"self.layers = nn.ModuleList([nn.ModuleList([Attention(width=16, context=17), Norm(17), {inner}])])"
    assert wrap(line, 8) == [
        "        self.layers = nn.ModuleList(",
        "            [",
        "                nn.ModuleList(",
        "                    [",
        "                        Attention(width=16, context=17),",
        "                        Norm(17),",
        f"                        {inner},",
        "                    ]",
        "                )",
        "            ]",
        "        )",
    ]
