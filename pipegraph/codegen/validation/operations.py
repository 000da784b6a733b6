"""Operations in normal form: calls that are equal by definition give one term.

- An argument that is the default of the operator's schema is left out, and so is one that changes no value (a device).
- A dimension is counted from the front.
- ``zeros``, ``ones_like``, ``new_full`` and the like are ``full`` with a number.
- An operand that is a tensor of one number, ``torch.tensor(64.0)``, is the number.
- A number with a tensor of floats is a float: ``x * 2`` is ``x * 2.0``.
- An elementwise operation of an expanded tensor is the operation of the tensor, expanded: it broadcasts anyway.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from pipegraph.codegen.validation.terms import Key, Operand, Terms
from pipegraph.torch_private.operators import OpOverload, operator_name, schema_arguments

# ---- views -----------------------------------------------------------------------------------------------------------
# Views in normal form: what shows the same elements in the same order is one term, however it is spelled.
#
# ====================================================  ======================================
# ``view``, ``unsqueeze``, ``squeeze``, ``flatten``      one reshape to the shape of the result
# ``transpose``, ``t``, ``permute``                      one permutation
# ``split``, ``chunk``, ``unbind``                       slices and selections
# ====================================================  ======================================


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


# ---- operations ------------------------------------------------------------------------------------------------------


EMBEDDING: Final = "aten.embedding."
CAST: Final = "aten._to_copy."
"""The operator of a term that is another one in another dtype."""

_IGNORED: Final = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "implicit"})
"""Arguments that change no value."""
_DIMENSION: Final = re.compile(r"(start_|end_)?dims?[01]?|axis")
_NEW_DIMENSION: Final = frozenset({"stack"})
"""Operators whose result has a dimension more than the argument: ``dim`` is one of the result."""
_FILLED: Final = {"zeros": 0, "ones": 1, "zero": 0, "full": None, "scalar_tensor": None, "fill": None}
"""Operators that make a tensor of one number → the number, if it is not an argument."""


def arguments_by_name(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that say something, by their names in the operator's schema."""
    names, defaults = _names_and_defaults(target)
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return {
        name: value
        for name, value in named.items()
        if name not in _IGNORED and not (name in defaults and _is_default(defaults[name], value))
    }


@cache
def _names_and_defaults(target: OpOverload) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    arguments = schema_arguments(target)
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return tuple(argument.name for argument in arguments), defaults


def _is_default(default: Any, value: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(default, bool) != isinstance(value, bool):
        return False
    return bool(default == value)


def operation_key(
    terms: Terms, target: OpOverload, named: Mapping[str, Any], result: Any, term_of: Callable[[Tensor], int]
) -> Key:
    """The term of an operation other than a view.

    Args:
        named: the arguments by name, as `arguments_by_name` returns them.
        result: a tensor, or a tuple of tensors.
        term_of: the term of a tensor.
    """
    name, overload = operator_name(target)
    shape = tuple(result.shape) if isinstance(result, Tensor) else ()
    dtype = str(result.dtype) if isinstance(result, Tensor) else ""
    stem = name.removeprefix("new_").removesuffix("_like")
    if stem in _FILLED and isinstance(result, Tensor):
        number = _filled_with(terms, stem, named, term_of)
        if number is not None:
            return Key("full", (_number(number, result),), shape, dtype)
    if stem == "empty":
        return Key("empty", (), shape, dtype)
    if name == "arange":
        limits = named.get("start", 0), named["end"], named.get("step", 1)
        return Key("arange", tuple(_number(number, result) for number in limits), shape, dtype)
    if name == "stack" and (numbers := _numbers_of(terms, named["tensors"], term_of)):
        return Key("constant", numbers, shape, dtype)
    rank = next((leaf.dim() for leaf in _tensors(named.values())), 0) + (name in _NEW_DIMENSION)

    def normal(key: str, value: Any) -> object:
        if isinstance(value, Tensor):
            return _operand(terms, term_of(value), is_first=key == "self" and value.dim() > 0)
        if isinstance(value, (tuple, list)):
            return tuple(normal(key, part) for part in value)
        if isinstance(value, int) and not isinstance(value, bool) and _DIMENSION.fullmatch(key):
            return dimension(value, rank)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key in _SCALARS:
            return _number(value, result)
        return _plain(value)

    values = {key: value for key, value in named.items() if not (key == "dtype" and dtype)}
    query = named.get("query")
    if isinstance(query, Tensor) and _is_default_scale(query, values.get("scale")):
        del values["scale"]
    arguments = tuple((key, normal(key, value)) for key, value in sorted(values.items()))
    return Key(f"{target.namespace}.{name}.{_merged_overload(overload)}", arguments, shape, dtype)


def elementwise_term(terms: Terms, key: Key) -> int:
    """The term of an elementwise operation, or of an embedding, which reads its operands before they are expanded."""
    shapes: list[Shape] = []
    is_embedding = key.operator == EMBEDDING

    def unexpanded(argument: object) -> object:
        if isinstance(argument, Operand):
            operand = Operand(_source_of_expansion(terms, argument.term))
            shapes.append(terms.keys[operand.term].shape)
            return operand
        if isinstance(argument, tuple) and not (is_embedding and argument[0] == "weight"):
            return tuple(map(unexpanded, argument))
        return argument

    arguments = tuple(map(unexpanded, key.arguments))
    if arguments == key.arguments:
        return terms.number(key)
    shape = (*shapes[0], key.shape[-1]) if is_embedding else tuple(torch.broadcast_shapes(*shapes))
    return view_term(terms, terms.number(key._replace(arguments=arguments, shape=shape)), expansion(shape, key.shape))


def _source_of_expansion(terms: Terms, term: int) -> int:
    """The tensor that was expanded to another shape, without new dimensions of size 1; the tensor itself if it was not
    expanded."""
    key = terms.keys[term]
    if key.operator != "expand":
        return term
    (source, *_) = key.arguments
    assert isinstance(source, Operand)
    inner = terms.keys[source.term]
    if inner.operator == "reshape":
        (base, *_) = inner.arguments
        assert isinstance(base, Operand)
        shape = terms.keys[base.term].shape
        if inner.shape == (1,) * (len(inner.shape) - len(shape)) + shape:
            return base.term
    return source.term


_SCALARS: Final = frozenset({"other", "alpha", "beta", "value", "self", "exponent", "min", "max", "fill_value", "end"})


def _is_default_scale(query: Tensor, scale: Any) -> bool:
    """Return whether attention has this scale by default: one over the square root of the size of a head."""
    return isinstance(scale, float) and math.isclose(scale, query.shape[-1] ** -0.5, rel_tol=1e-7)


def _merged_overload(overload: str) -> str:
    """``Scalar`` and ``Tensor`` are one form: the operand says which of them it is."""
    return "" if overload in ("Scalar", "Tensor", "default", "Tensor_Scalar", "int_Scalar") else overload


def _filled_with(terms: Terms, stem: str, named: Mapping[str, Any], term_of: Callable[[Tensor], int]) -> Any:
    """The number of which a factory makes a tensor; None if it is not known."""
    number = _FILLED[stem]
    if number is not None:
        return number
    value = next((named[key] for key in ("fill_value", "value", "s") if key in named), None)
    if isinstance(value, Tensor):
        key = terms.keys[term_of(value)]
        return number_in(key)
    return value


def _tensors(values: Any) -> list[Tensor]:
    leaves: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            leaves.append(value)
        elif isinstance(value, (tuple, list)):
            leaves += _tensors(value)
    return leaves


def _operand(terms: Terms, term: int, is_first: bool) -> object:
    """A term as an argument; the number for a tensor of one number."""
    key = terms.keys[term]
    if key.operator == "full" and key.shape == () and not is_first:
        return key.arguments[0]
    return Operand(term)


def _number(value: Any, result: Tensor) -> object:
    """A number as an argument, with its kind: 1, 1.0 and True are one key of a dict in Python."""
    if isinstance(value, (int, float)) and isinstance(result, Tensor):
        value = float(value) if result.is_floating_point() else value
    return _plain(value)


def number_argument(value: float) -> object:
    """A number as an argument."""
    return _plain(value)


def number_in(key: Key) -> float | None:
    """The number of which a tensor is made; None if it is not known, or is not one."""
    if key.operator != "full":
        return None
    _, value = key.arguments[0]  # type: ignore[misc]
    return float(value) if isinstance(value, str) else value  # type: ignore[has-type]


def _numbers_of(terms: Terms, tensors: Sequence[Tensor], term_of: Callable[[Tensor], int]) -> tuple[object, ...]:
    """The numbers of a list of tensors of one number each; empty if some are not."""
    keys = [terms.keys[term_of(tensor)] for tensor in tensors]
    return (
        tuple(key.arguments[0] for key in keys) if all(key.operator == "full" and not key.shape for key in keys) else ()
    )


def _plain(value: Any) -> object:
    """An argument other than a tensor: with its kind if it is a number, else as text."""
    if isinstance(value, float):
        return "float", f"{value:.12g}"  # a square root is rounded otherwise in C++ than in Python
    if value is None or isinstance(value, (int, bool, str)):
        return type(value).__name__, value
    return "text", str(value)
