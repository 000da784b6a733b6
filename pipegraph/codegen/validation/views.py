"""Views in normal form: what shows the same elements in the same order is one term, however it is spelled.

====================================================  ======================================
``view``, ``unsqueeze``, ``squeeze``, ``flatten``      one reshape to the shape of the result
``transpose``, ``t``, ``permute``                      one permutation
``split``, ``chunk``, ``unbind``                       slices and selections
====================================================  ======================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

from pipegraph.codegen.validation.terms import Key, Operand, Terms

Shape = tuple[int, ...]


class Step(NamedTuple):
    """One step from a tensor to a view of it: ``slice`` with its dimension, start, end and step.

    Attributes:
        operator: ``reshape``, ``permute``, ``expand``, ``slice`` or ``select``.
        arguments: numbers, and none that is counted from the end.
        shape: of the view.
    """

    operator: str
    arguments: tuple[int, ...]
    shape: Shape


_RESHAPES: Final = frozenset({"view", "_unsafe_view", "unsqueeze", "squeeze", "_reshape_alias", "reshape", "flatten"})
_TRANSPOSES: Final = frozenset({"transpose", "swapaxes", "swapdims"})
_IDENTITIES: Final = frozenset({"alias", "detach", "detach_", "lift_fresh", "contiguous"})


def view_steps(name: str, named: Mapping[str, Any], source: Tensor, result: Tensor) -> list[Step] | None:
    """The steps from a tensor to a view of it; None for an operator that this table does not have.

    Args:
        name: of the operator, without its overload.
        named: its arguments by name.
        source: the first argument.
        result: the view.
    """
    shape, view_shape = tuple(source.shape), tuple(result.shape)
    if name in _RESHAPES and source.dtype == result.dtype:
        return _reshape(shape, view_shape)
    if name in _TRANSPOSES or name in ("t", "numpy_T"):
        order = list(range(len(shape)))
        if name in _TRANSPOSES:
            first, second = (dimension(named.get(key, 0), len(shape)) for key in ("dim0", "dim1"))
            order[first], order[second] = second, first
        else:
            order.reverse()
        return _permutation(order, view_shape)
    if name == "permute":
        return _permutation([dimension(dim, len(shape)) for dim in named["dims"]], view_shape)
    if name == "expand":
        return expansion(shape, view_shape)
    if name == "slice":
        return _slice(shape, named.get("dim", 0), slice(named.get("start"), named.get("end"), named.get("step", 1)))
    if name == "select":
        return _selection(shape, named["dim"], named["index"])
    return [] if name in _IDENTITIES else None


def split_steps(
    name: str, named: Mapping[str, Any], source: Tensor, results: Sequence[Tensor]
) -> list[list[Step]] | None:
    """The steps to each result of ``split``, ``chunk`` or ``unbind``; None for any other operator."""
    shape = tuple(source.shape)
    dim = dimension(named.get("dim", 0), len(shape)) if name in _SPLITS else 0
    if name == "unbind":
        return [_selection(shape, dim, index) for index in range(len(results))]
    if name not in _SPLITS:
        return None
    steps, start = [], 0
    for result in results:
        steps.append(_slice(shape, dim, slice(start, start + result.shape[dim])))
        start += result.shape[dim]
    return steps


_SPLITS: Final = frozenset({"split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk"})


def dimension(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim % rank if rank else 0


def expansion(shape: Shape, view_shape: Shape) -> list[Step]:
    """The steps that broadcast a tensor to a shape."""
    longer = (1,) * (len(view_shape) - len(shape)) + shape
    return [*_reshape(shape, longer), *([] if longer == view_shape else [Step("expand", view_shape, view_shape)])]


def _reshape(shape: Shape, view_shape: Shape) -> list[Step]:
    return [] if shape == view_shape else [Step("reshape", view_shape, view_shape)]


def _permutation(order: Sequence[int], view_shape: Shape) -> list[Step]:
    return [] if list(order) == sorted(order) else [Step("permute", tuple(order), view_shape)]


def _slice(shape: Shape, dim: int, part: slice) -> list[Step]:
    dim = dimension(dim, len(shape))
    rows = range(shape[dim])[part]
    if len(rows) == shape[dim] and rows.step == 1:
        return []
    step = rows.step if len(rows) > 1 else 1
    view_shape = (*shape[:dim], len(rows), *shape[dim + 1 :])
    return [Step("slice", (dim, rows.start if len(rows) else 0, len(rows), step), view_shape)]


def _selection(shape: Shape, dim: int, index: int) -> list[Step]:
    dim = dimension(dim, len(shape))
    return [Step("select", (dim, index % shape[dim]), (*shape[:dim], *shape[dim + 1 :]))]


def view_term(terms: Terms, source: int, steps: Sequence[Step]) -> int:
    """The term of a view, in which adjacent reshapes, permutations and expansions are one."""
    term = source
    for step in steps:
        term = _step_term(terms, term, step)
    return term


def _step_term(terms: Terms, source: int, step: Step) -> int:
    key = terms.keys[source]
    arguments = step.arguments
    if key.operator == "full":  # of one number, whatever the view
        return terms.number(key._replace(shape=step.shape))
    if key.operator == step.operator and step.operator in ("reshape", "permute", "expand"):
        inner, *order = key.arguments
        assert isinstance(inner, Operand)
        source = inner.term
        if step.operator == "permute":
            arguments = tuple(int(order[dim]) for dim in arguments)  # type: ignore[call-overload]
            is_same = list(arguments) == sorted(arguments)
        else:
            is_same = terms.keys[source].shape == step.shape
        if is_same:
            return source
    return terms.number(Key(step.operator, (Operand(source), *arguments), step.shape, key.dtype))
