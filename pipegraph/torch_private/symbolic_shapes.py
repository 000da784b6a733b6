"""Symbolic sizes of a traced graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx


class UnboundSizeError(RuntimeError):
    """Torch cannot say how the size of a result follows from the symbols."""


def shape_environment() -> Any:
    """Return a new shape environment, which collects the conditions on symbols.

    Public torch has symbols only inside `torch.export` and `torch.compile`. Two sizes that are equal now stay two
    symbols, and an operation whose shape depends on values raises, as it does without symbols. A symbol may be 1.
    If torch would make a new symbol for a size, UnboundSizeError is raised: no call gives its value.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class KnownSizes(ShapeEnv):
        def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> Any:
            raise UnboundSizeError("the size of a result does not follow from sizes of the inputs")

    return KnownSizes(
        allow_scalar_outputs=False,
        allow_dynamic_output_shape_ops=False,
        duck_shape=False,
        specialize_zero_one=False,
    )


_LIMITS = 1, 2**31 - 1


def new_symbol(environment: Any, name: str, number: int) -> torch.SymInt:
    """Return a new symbol for a size that is `number` now, at least 1. Sources are named by a private class.

    A size is below 2³¹. Then it is known that a slice to the end, which in a graph is one to 2⁶³ − 1, ends there.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StrictMinMaxConstraint
    from torch.utils._sympy.value_ranges import ValueRanges

    source = ConstantSource(name)
    limits = StrictMinMaxConstraint(vr=ValueRanges(*_LIMITS), warn_only=False)
    symbol = environment.create_symbol(number, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=limits)
    value: torch.SymInt = environment.create_symintnode(symbol, hint=number, source=source)
    return value


def placeholder_symbol(index: int) -> Any:
    """Return a symbol of no environment, the same one for the same index."""
    import sympy  # which takes half a second

    return sympy.Symbol(f"size_{index}", integer=True, positive=True)


def is_symbolic(value: Any) -> bool:
    """Return whether a value is symbolic, not a number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def expression(value: Any) -> Any:
    """Return a symbolic value as sympy's expression of symbols, and a number as itself.

    The one is the attribute `node.expr`, which has no public name; a symbolic value is not hashable.
    """
    if not is_symbolic(value):
        return value
    expr = value.node.expr
    return int(expr) if expr.is_Integer else expr


def number_of(value: Any) -> int:
    """Return what a size is in the call that is traced, without a condition that it always is."""
    return int(value.node.hint) if is_symbolic(value) else int(value)


def evaluate(value: Any, numbers: Mapping[Any, Any]) -> Any:
    """Return an expression with other values in place of its symbols: numbers, symbolic ones, or proxies of a graph.

    sympy's own `lambdify` does not know torch's functions, such as whole division.
    """
    if not hasattr(value, "free_symbols"):
        return value
    from torch.utils._sympy.interp import sympy_interp

    return sympy_interp(_size_analysis(), dict(numbers), value)


@cache
def _size_analysis() -> type:
    """What the functions of an expression are in Python.

    torch's own leaves a fraction an expression of sympy, of which neither a symbolic number nor a proxy can be part.
    """
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    def rounded(function: Callable[[Any], Any]) -> Callable[..., Any]:
        def apply(value: Any, dtype: torch.dtype) -> Any:
            if isinstance(value, fx.Proxy):  # Python asks for a method that a proxy has not
                return value.tracer.create_proxy("call_function", function, (value,), {})
            return function(value)

        return apply

    methods = {
        "int_truediv": operator.truediv,
        "truediv": operator.truediv,
        "trunc_to_int": rounded(torch.sym_int),
        "round_to_int": rounded(round),
        "floor_to_int": rounded(math.floor),
        "ceil_to_int": rounded(math.ceil),
    }
    return type(
        "SizeAnalysis", (PythonReferenceAnalysis,), {name: staticmethod(method) for name, method in methods.items()}
    )


def condition_count(environment: Any) -> int:
    """Return how many conditions there are. They only become more, with all that is traced and compiled."""
    return len(environment.guards)


def conditions(environment: Any) -> list[Any]:
    """Return the conditions on the symbols under which the graphs traced and compiled with them are right.

    `produce_guards_expression`, which torch's cache of compiled graphs uses for this, gives text for `eval`.
    """
    import sympy

    expressions = [guard.expr for guard in environment.guards]
    for symbol, limits in environment.var_to_range.items():
        expressions += [sympy.Ge(symbol, limits.lower)] if limits.lower.is_Integer else []
        expressions += [sympy.Le(symbol, limits.upper)] if limits.upper.is_Integer else []
    return [condition for condition in dict.fromkeys(expressions) if condition != sympy.true]


def hold(conditions: Iterable[Any], numbers: Mapping[Any, int]) -> bool:
    """Return whether all conditions hold for these values of their symbols. Conditions may have functions of torch."""
    import sympy

    values = {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
    return all(condition.xreplace(values) == sympy.true for condition in conditions)


def described(environment: Any, names: Mapping[Any, str]) -> list[str]:
    """Return the conditions as text, with these names of the symbols. The limits of sizes follow from them."""
    import sympy

    named = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in names.items()}
    expressions = [guard.expr.xreplace(named) for guard in environment.guards]
    relations = [term for term in expressions if isinstance(term, sympy.core.relational.Relational)]
    texts = [f"{term.lhs} {term.rel_op} {term.rhs}" if term in relations else str(term) for term in expressions]
    return list(dict.fromkeys(texts))
