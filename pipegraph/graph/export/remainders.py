"""Sizes that a model pads to a multiple of a chunk: whether its program holds with and without padding.

``torch.export`` follows the branch of the example in ``if pad > 0: y = y[:, :length]``, and notes ``pad > 0``. At a
length that needs no padding, the slice takes everything, and the operations are the same ones. The model and the
program are therefore compared at such lengths, as for sizes of 1; a relation that no comparison contradicts is left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import sympy

from pipegraph.graph.export.size_guards import SizeGuards, Sizes

_SAMPLES: Final = 3
"""Lengths that are compared for each set of relations that do not hold there."""


def without_remainders(guards: SizeGuards, is_same: Callable[[Sizes], bool]) -> SizeGuards:
    """Return the guards without those that the model does not depend on.

    Args:
        guards: of a program.
        is_same: whether the program does what the model does at some sizes.
    """
    candidates = frozenset(relation for relation in guards.required if _is_about_remainder(relation))
    if not candidates:
        return guards
    compared: dict[frozenset[sympy.Basic], list[bool]] = {}
    for sizes in _samples(guards, candidates):
        failing = guards.failing(sizes)
        if failing and failing <= candidates and len(compared.setdefault(failing, [])) < _SAMPLES:
            compared[failing].append(is_same(sizes))
    required = {relation for failing, results in compared.items() if not all(results) for relation in failing}
    tried = {relation for failing in compared for relation in failing}
    return guards.without(tried - required)


def sizes_of_some_remainders(guards: SizeGuards) -> Iterator[sympy.Symbol]:
    """Yield the sizes for only some of whose remainders a program holds: for multiples of a chunk, say."""
    relations = frozenset(filter(_has_remainder, guards.required))
    for symbol in sorted({symbol for relation in relations for symbol in relation.free_symbols}, key=str):
        if any(guards.failing({symbol: guards.captured[symbol] + away}) & relations for away in (1, 2)):
            yield symbol


def _samples(guards: SizeGuards, relations: frozenset[sympy.Basic]) -> Iterator[Sizes]:
    """Sizes below a chunk, and at and between its multiples around those of the capture; one size changes at a time."""
    remainders = [part for relation in relations for part in _remainders(relation)]
    chunks = sorted({int(part.args[1]) for part in remainders if part.args[1].is_Integer})
    for symbol in sorted({symbol for relation in relations for symbol in relation.free_symbols}, key=str):
        captured = guards.captured[symbol]
        lengths = {captured + away for away in (-2, -1, 1, 2)}
        for chunk in chunks:
            multiple = captured // chunk * chunk
            lengths |= {1, chunk // 2, chunk - 1, chunk}
            lengths |= {multiple + count * chunk + remainder for count in range(-2, 4) for remainder in (0, 1)}
        yield from ({symbol: length} for length in sorted(lengths) if length > 0 and length != captured)


def _is_about_remainder(relation: sympy.Basic) -> bool:
    return _has_remainder(relation) and not isinstance(relation, sympy.Eq)


def _has_remainder(relation: sympy.Basic) -> bool:
    return next(_remainders(relation), None) is not None


def _remainders(relation: sympy.Basic) -> Iterator[sympy.Basic]:
    for part in sympy.preorder_traversal(relation):
        if type(part).__name__ in ("Mod", "PythonMod"):
            yield part
