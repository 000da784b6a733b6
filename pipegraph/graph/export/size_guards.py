"""What an exported program takes for granted of the sizes of its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from copy import copy

import sympy
from sympy.core.relational import Ge, Gt, Le, Lt, Ne

from pipegraph.graph.symbolic_size import SizeLimits, expression_text

Sizes = Mapping[sympy.Symbol, int]

# The largest size that is looked for, for which something does not hold.
_LARGEST = 64


class SizeGuards:
    """The relations of sizes under which an exported program does what the model does.

    Attributes:
        captured: size → its value at capture.
        required: the relations that the program depends on.
        assumed: relations that only say that a size is not 1, which ``torch.export`` assumes of each size: ``n > 1``,
            ``m != m * n`` and ``m % (m * n) != 0``. The program may do the same as the model if they do not hold.
    """

    def __init__(self, captured: Sizes, guards: Iterable[sympy.Basic]) -> None:
        self.captured = captured
        candidates = (relation for guard in guards for relation in self._relations(guard) if relation.free_symbols)
        relations = [relation for relation in candidates if not _is_evident(relation)]
        self.assumed = tuple(dict.fromkeys(filter(_is_about_one, relations)))
        self.required = tuple(relation for relation in dict.fromkeys(relations) if relation not in self.assumed)

    def allow(self, sizes: Sizes) -> bool:
        """Return whether the required relations hold for sizes; those left out are as at capture."""
        return all(self._holds(relation, sizes, if_undefined=False) for relation in self.required)

    def failing(self, sizes: Sizes) -> frozenset[sympy.Basic]:
        """The required relations that do not hold for sizes; those left out are as at capture."""
        return frozenset(relation for relation in self.required if not self._holds(relation, sizes, if_undefined=False))

    def without(self, relations: AbstractSet[sympy.Basic]) -> SizeGuards:
        """Return these guards without some of the required relations."""
        guards = copy(self)
        guards.required = tuple(relation for relation in self.required if relation not in relations)
        return guards

    def exception(self, relation: sympy.Basic) -> Sizes | None:
        """Small sizes that are allowed and for which a relation does not hold; None if none were found."""
        symbols = sorted(relation.free_symbols, key=str)
        for size in range(1, _LARGEST + 1):
            for changed in (*([symbol] for symbol in symbols), symbols):
                sizes = dict.fromkeys(changed, size)
                if not self._holds(relation, sizes, if_undefined=True) and self.allow(sizes):
                    return sizes
        return None

    def limits(self, also: Iterable[sympy.Basic]) -> SizeLimits:
        """The bounds and conditions that the required relations are, and others."""
        lowest: dict[str, int] = {}
        highest: dict[str, int] = {}
        conditions: dict[str, None] = {}
        for relation in (*self.required, *also):
            left_side, symbol, right = relation.lhs, relation.rel_op, relation.rhs
            if left_side.is_Symbol and right.is_Integer and symbol in (">", ">="):
                lowest[str(left_side)] = max(lowest.get(str(left_side), 1), int(right) + (symbol == ">"))
            elif left_side.is_Symbol and right.is_Integer and symbol in ("<", "<="):
                highest[str(left_side)] = min(highest.get(str(left_side), 2**62), int(right) - (symbol == "<"))
            else:
                conditions[f"{expression_text(left_side)} {symbol} {expression_text(right)}"] = None
        captured = {str(symbol): size for symbol, size in self.captured.items()}
        return SizeLimits(captured, lowest, highest, tuple(conditions))

    def _relations(self, guard: sympy.Basic) -> Iterator[sympy.Basic]:
        """The relations of a guard, with ``n`` for ``Max(1, n)`` and ``Min(n, n * m)``, because no size is 0.

        Of several, one of which is enough (the ways in which memory may be contiguous), it is the one that holds at
        capture and says something of the fewest sizes.
        """
        if isinstance(guard, sympy.And):
            for part in guard.args:
                yield from self._relations(part)
        elif isinstance(guard, sympy.Or):
            true_parts = [part for part in guard.args if self._holds(part, {}, if_undefined=False)]
            if true_parts:
                yield from self._relations(min(true_parts, key=lambda part: (len(part.free_symbols), str(part))))
            else:
                yield guard
        else:
            yield guard.replace(_is_size_or_one, _without_one).replace(_is_least, _without_multiples)

    def _holds(self, relation: sympy.Basic, sizes: Sizes, if_undefined: bool) -> bool:
        """Return whether a relation holds. It is undefined if it divides by a size that would be 0, or divides one that
        would be negative."""
        numbers = {symbol: sympy.Integer(size) for symbol, size in {**self.captured, **sizes}.items()}
        try:
            return bool(relation.xreplace(numbers))
        except (ZeroDivisionError, AssertionError):
            return if_undefined


def _is_evident(relation: sympy.Basic) -> bool:
    """Return whether a guard says no more than ``min(n, 6) <= n``, or ``max(n, 6) >= n``."""
    if not isinstance(relation, (Le, Ge)):
        return False
    smaller, larger = relation.args if isinstance(relation, Le) else reversed(relation.args)
    is_minimum = type(smaller).__name__ == "Min" and larger in smaller.args
    return is_minimum or (type(larger).__name__ == "Max" and smaller in larger.args)


def same_sizes(
    guards: Iterable[sympy.Basic],
    varying: Iterable[tuple[sympy.Symbol, int, int]],
) -> dict[sympy.Symbol, sympy.Symbol]:
    """The sizes that are taken for earlier ones, because a guard compares the same expression of both.

    What flattens tokens and targets, and compares them, asks for ``batch * length == targets_0 * targets_1`` alone.

    Args:
        guards: of a program.
        varying: (symbol, dimension, size in the example) of the inputs' dynamic sizes, in the order of the inputs.
    """
    sizes: dict[sympy.Symbol, int] = {}
    equal_symbols: dict[sympy.Symbol, sympy.Symbol] = {}
    for symbol, _, size in varying:
        sizes.setdefault(symbol, size)
    for guard in (relation.xreplace(equal_symbols) for relation in guards):
        if not isinstance(guard, sympy.Eq):
            continue
        left_side, right = guard.args
        left_symbols, right_symbols = (
            [size for size in sizes if size in side.free_symbols - other_side.free_symbols]
            for side, other_side in ((left_side, right), (right, left_side))
        )
        pairs = dict(zip(left_symbols, right_symbols, strict=False))
        if [sizes[size] for size in left_symbols] != [sizes[size] for size in right_symbols]:
            continue
        if sympy.expand(left_side.xreplace(pairs) - right) == 0:
            order = list(sizes)
            equal_symbols |= dict(sorted(pair, key=order.index, reverse=True) for pair in pairs.items())
    return equal_symbols


def _is_size_or_one(part: sympy.Basic) -> bool:
    return type(part).__name__ == "Max" and len(part.args) == 2 and sympy.Integer(1) in part.args


def _without_one(part: sympy.Basic) -> sympy.Basic:
    return next(operand for operand in part.args if operand != 1)


def _is_least(part: sympy.Basic) -> bool:
    return type(part).__name__ == "Min"


def _without_multiples(part: sympy.Basic) -> sympy.Basic:
    return part.func(*(size for size in part.args if not any(_is_multiple(size, divisor) for divisor in part.args)))


def _is_about_one(relation: sympy.Basic) -> bool:
    """Return whether a guard only says that a size is not 0 or 1, as the program takes for granted of each."""
    if not isinstance(relation, (Ne, Gt, Ge, Lt, Le)):
        return False
    lhs, right = relation.args
    if type(lhs).__name__ in ("Mod", "PythonMod"):
        return isinstance(relation, sympy.Ne) and right == 0 and _is_multiple(lhs.args[1], lhs.args[0])
    return any(side in (0, 1) for side in (lhs, right)) or _is_multiple(lhs, right) or _is_multiple(right, lhs)


def _is_multiple(size: sympy.Expr, divisor: sympy.Expr) -> bool:
    """Return whether a size is another one times further sizes."""
    quotient = size / divisor
    return bool(quotient.free_symbols) and quotient.as_numer_denom()[1] == 1
