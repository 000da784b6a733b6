"""Sizes that vary with the inputs of a model: numbers that know how they follow from the sizes of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import sympy

T = TypeVar("T")

FUNCTIONS = {"Min": "min", "Max": "max"}
"""torch's function in an expression → Python's."""

LONGEST_TEXT: Final = 1000
"""Characters of an expression that a package holds. A size that would need more is fixed."""

OPERATORS = {
    **{"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%"},
    **{"IntTrueDiv": "/", "FloatTrueDiv": "/"},
    **FUNCTIONS,
}
"""torch's function in an expression → Python's operator or function."""

ROUNDINGS = {"TruncToInt": "int", "RoundToInt": "round", "FloorToInt": "math.floor", "CeilToInt": "math.ceil"}
"""torch's function that makes a whole number of a fraction → Python's."""

TO_FLOAT = "ToFloat"
"""torch's function of a whole number in a fraction, which Python needs none for."""


class UnknownSizeError(Exception):
    """There is no expression for a size.

    Attributes:
        size: the size.
        parent: the one that it is a part of, if that is known.
    """

    def __init__(self, size: sympy.Expr, parent: sympy.Expr | None = None) -> None:
        super().__init__(str(size))
        self.size, self.parent = size, parent


InputDimension = tuple[int, int]
"""The position of a tensor among the leaves of (args, kwargs), and one of its dimensions."""


@dataclass(frozen=True)
class FixedSize:
    """A size of an input that does not vary.

    Attributes:
        place: its place in the inputs: ``tokens.shape[1]``.
        size: its value.
        line: the line of the model's source that fixes it: ``/models/mamba.py:12: code``; "" if it is not known.
        reason: why it does not vary, in words.
    """

    place: str
    size: int
    line: str = ""
    reason: str = ""

    @property
    def place_in_source(self) -> str:
        """The file and the number of the line: ``mamba.py:12``."""
        file, _, number = self.line.partition(": ")[0].rpartition(":")
        return f"{Path(file).name}:{number}"

    def __str__(self) -> str:
        return f"{self.place} is {self.size} in every batch: {self.line or self.reason}"


@dataclass(frozen=True)
class SizeLimits:
    """The sizes of inputs, and what holds of them.

    Attributes:
        captured: size → its value at capture.
        lowest, highest: size → the bounds, if the model has any.
        conditions: what else the program takes for granted, as Python: ``images_2 % 2 == 0``. A model that branches on
            its sizes takes the branch of the example; another one may be right where a condition does not hold.
        fixed: the sizes that do not vary.
    """

    captured: Mapping[str, int]
    lowest: Mapping[str, int]
    highest: Mapping[str, int]
    conditions: tuple[str, ...]
    fixed: tuple[FixedSize, ...] = ()


class SymbolicSize(int):
    """A size of the captured example, as an expression of the sizes of the model's inputs.

    Used as a number, it is its value at capture. It is equal to another size only if their expressions are equal, and
    never to a plain number: a batch of 8 is not the 8 heads of the model.

    Attributes:
        expression: a polynomial of symbols, such as ``batch``, and of their quotients and remainders that are not
            polynomials.
        symbols: each symbol of the expression → its value at capture.
    """

    expression: sympy.Expr
    symbols: Mapping[sympy.Symbol, int]

    def __new__(cls, expression: sympy.Expr, symbols: Mapping[sympy.Symbol, int]) -> SymbolicSize:
        expression = _without_exact_divisions(sympy.expand(expression))
        sizes = {symbol: symbols[symbol] for symbol in sorted(expression.free_symbols, key=str)}
        size = super().__new__(cls, _evaluate(expression, tuple(sizes.items())))
        size.expression, size.symbols = expression, MappingProxyType(sizes)
        return size

    @property
    def text(self) -> str:
        """The expression as Python: ``2 * (tokens_1 // 4)``."""
        return expression_text(self.expression)

    def at(self, sizes: Mapping[sympy.Symbol, int]) -> int:
        """The size for other values of its symbols."""
        return _evaluate(self.expression, tuple((symbol, sizes[symbol]) for symbol in self.symbols))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SymbolicSize) and bool(self.expression == other.expression)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.expression)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.expression, dict(self.symbols)

    def __mul__(self, other: Any) -> int:
        if isinstance(other, SymbolicSize):
            return SymbolicSize(self.expression * other.expression, {**self.symbols, **other.symbols})
        return SymbolicSize(self.expression * int(other), self.symbols) if other else 0

    __rmul__ = __mul__


def fold(
    expression: sympy.Expr,
    leaf: Callable[[sympy.Expr], T | None],
    combine: Callable[[str, T, T], T],
    rounded: Callable[[str, T], T],
) -> T:
    """Build something from an expression: a text, an expression of Python.

    Args:
        expression: a sum, product, power, quotient, remainder, minimum, maximum or whole number of a fraction, nested.
        leaf: returns what stands for a part; None if it is to be built from the parts of it.
        combine: (``+ - * / // %``, ``min`` or ``max``, left, right) → what stands for the operation.
        rounded: (a function of `ROUNDINGS`, its argument) → what stands for the whole number.

    Raises:
        UnknownSizeError: there is no leaf for a symbol.
    """

    def build(part: sympy.Expr) -> T:
        leaf_value = leaf(part)
        if leaf_value is not None:
            return leaf_value
        if isinstance(part, sympy.Add):
            return total(part)
        if isinstance(part, sympy.Mul):
            factors = sorted(part.as_ordered_factors(), key=lambda factor: factor.is_Float)  # n * 0.5, but 2 * n
            return reduce(lambda product, right: combine("*", product, right), map(build, factors))
        if isinstance(part, sympy.Pow):
            return reduce(lambda product, right: combine("*", product, right), [build(part.base)] * int(part.exp))
        name = type(part).__name__
        if name == TO_FLOAT:
            return build(part.args[0])
        if name in ROUNDINGS:
            return rounded(ROUNDINGS[name], build(part.args[0]))
        symbol = OPERATORS.get(name)
        if symbol is None:
            raise UnknownSizeError(part)
        operands = sympy.ordered(part.args) if symbol in FUNCTIONS.values() else part.args
        return reduce(partial(combine, symbol), map(build, operands))

    def total(part: sympy.Add) -> T:
        """The sum, with terms that are added before those that are subtracted."""
        first, *terms = sorted(part.as_ordered_terms(), key=_is_negative)
        subtotal = build(first)
        for term in terms:
            negative = _is_negative(term)
            subtotal = combine("-" if negative else "+", subtotal, build(-term if negative else term))
        return subtotal

    return build(expression)


_EXACT_QUOTIENT: Final = sympy.Function("CleanDiv")


def in_dimensions(
    expression: sympy.Expr, dimensions: Iterable[sympy.Expr]
) -> tuple[sympy.Expr, dict[sympy.Symbol, sympy.Expr]] | None:
    """Write an expression with dimensions of tensors: ``H * W`` for a sum of which no part is a dimension.

    A dimension that is ``factor * term + constant`` gives the term, and ``a // 4`` gives ``a // 8``.

        expression    (a // 4) * (b // 4) + a // 4 + b // 4 + 1
        dimensions    a // 4 + 1, b // 4 + 1
        result        first * second

    Args:
        expression: a size.
        dimensions: the sizes that can be read.

    Returns:
        the expression in symbols, and the dimension that each symbol stands for; None if it does not follow.
    """
    terms: dict[sympy.Expr, sympy.Expr] = {}
    places: dict[sympy.Symbol, sympy.Expr] = {}
    for dimension in dict.fromkeys(dimensions):
        constant, multiple = dimension.as_coeff_Add()
        factor, term = multiple.as_coeff_Mul()
        if term.is_Add or not (factor.is_Integer and factor > 0 and term.free_symbols):
            continue
        symbol = sympy.Dummy(integer=True, positive=True)
        if term not in terms or factor == 1:
            places[symbol] = dimension
            terms[term] = symbol - constant if factor == 1 else _EXACT_QUOTIENT(symbol - constant, factor)
    quotients = [term for term in terms if _is_floor_division(term) and term.args[1].is_Integer]

    def of_quotient(part: sympy.Expr) -> sympy.Expr | None:
        """``first // 2`` for ``a // 8``, where ``first`` is ``a // 4``."""
        if not _is_floor_division(part) or part in terms or not part.args[1].is_Integer:
            return None
        dividend, divisor = part.args
        divided = (term for term in quotients if term.args[0] == dividend and divisor % term.args[1] == 0)
        return next((type(part)(terms[term], divisor // term.args[1]) for term in divided), None)

    expression = expression.replace(lambda part: of_quotient(part) is not None, of_quotient)
    written = sympy.expand(expression.xreplace(terms))
    symbols = written.free_symbols
    return (written, {symbol: places[symbol] for symbol in symbols}) if symbols <= places.keys() else None


def _is_floor_division(expression: sympy.Expr) -> bool:
    return OPERATORS.get(type(expression).__name__) == "//"


@lru_cache(maxsize=4096)
def expression_text(expression: sympy.Expr) -> str:
    """An expression as Python: ``2 * (tokens_1 // 4)``."""

    def leaf(part: sympy.Expr) -> str | None:
        if part.is_Float:
            return repr(float(part))
        return str(part) if part.is_Integer or part.is_Symbol else None

    def combine(symbol: str, left_operand: str, right: str) -> str:
        if symbol in FUNCTIONS.values():
            return f"{symbol}({left_operand}, {right})"
        is_sum = " + " in left_operand or " - " in left_operand
        left_operand = f"({left_operand})" if is_sum and symbol not in "+-" else left_operand
        right = f"({right})" if " " in right and symbol != "+" else right
        return f"{left_operand} {symbol} {right}"

    return fold(expression, leaf, combine, lambda function, argument: f"{function}({argument})")


def _is_negative(term: sympy.Expr) -> bool:
    return bool(term.could_extract_minus_sign())


@lru_cache(maxsize=4096)
def _without_exact_divisions(expression: sympy.Expr) -> sympy.Expr:
    """``seq`` for ``seq * seq // seq``, which torch gives as the size that a reshape leaves open."""

    def is_exact(part: sympy.Expr) -> bool:
        if not _is_floor_division(part):
            return False
        quotient = _quotient(part)
        numbers = quotient.as_coefficients_dict().values()
        return quotient.is_polynomial(*quotient.free_symbols) and all(number.is_Integer for number in numbers)

    return sympy.expand(expression.replace(is_exact, _quotient))


def _quotient(division: sympy.Expr) -> sympy.Expr:
    dividend, divisor = division.args
    return sympy.expand(sympy.cancel(dividend / divisor))


@lru_cache(maxsize=4096)
def _evaluate(expression: sympy.Expr, sizes: tuple[tuple[sympy.Symbol, int], ...]) -> int:
    return int(expression.xreplace({symbol: sympy.Integer(value) for symbol, value in sizes}))
