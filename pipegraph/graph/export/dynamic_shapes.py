"""The sizes of inputs that may vary: as a user asks for them, and as far as an exported program lets them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import sympy
import torch
from sympy.core.relational import Ge, Gt, Le, Lt, Ne
from torch import nn
from torch.export import Dim

from pipegraph.errors import CaptureError, nearest
from pipegraph.graph.internals import pytree
from pipegraph.graph.symbolic_size import FixedSize, InputDimension, SizeLimits, expression_text

BATCH = "batch"
"""The name of the size that is cut into microbatches."""

_FORM = 'dynamic_shapes={"tokens": {0: "batch", 1: torch.export.Dim("length", max=4096)}}'

Sizes = Mapping[sympy.Symbol, int]

# The largest size that is looked for, for which something does not hold.
_LARGEST = 64


@dataclass(frozen=True)
class SizeNames:
    """Names of sizes of inputs, in place of the usual ones. Two dimensions of one name are one size.

    Attributes:
        by_dimension: dimension → the name of its size.
        by_user: whether the user named sizes, and so says which of them are the same.
    """

    by_dimension: Mapping[InputDimension, str] = field(default_factory=dict)
    by_user: bool = False

    def with_rows(self, dimensions: Iterable[InputDimension]) -> SizeNames:
        """The same, with the name of the batch for the rows of inputs."""
        return replace(self, by_dimension={**self.by_dimension, **dict.fromkeys(dimensions, BATCH)})


USUAL_NAMES: Final = SizeNames()


@dataclass(frozen=True)
class WantedSizes:
    """Which sizes of inputs may vary, and how they are called.

    Attributes:
        fixed: the dimensions whose sizes do not vary; None for all.
        names: of sizes.
        bounds: name of a size → its smallest and its largest value; None if it has none.
        places: the dimensions that have to vary → where they are: ``tokens.shape[1]``.
        fixed_rows: of the fixed ones, those of rows that do not vary in another input.
    """

    fixed: frozenset[InputDimension] | None = frozenset()
    names: SizeNames = USUAL_NAMES
    bounds: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    places: Mapping[InputDimension, str] = field(default_factory=dict)
    fixed_rows: frozenset[InputDimension] = frozenset()

    def with_fixed_rows(self, rows: frozenset[InputDimension]) -> WantedSizes:
        """The same with a number of rows that does not vary."""
        return replace(self, fixed=(self.fixed or frozenset()) | rows, fixed_rows=rows)

    def limited(self, limits: SizeLimits, fixed: Mapping[InputDimension, FixedSize]) -> SizeLimits:
        """Limits with the bounds that the user gave.

        Raises:
            CaptureError: a size that has to vary does not.
        """
        for dimension, size in fixed.items():
            if dimension in self.places:
                why = size.line or size.reason
                raise CaptureError(
                    f"dynamic_shapes lets {self.places[dimension]} vary, but it is always {size.size}: {why}\n"
                    "Try: without this dimension, or torch.export.Dim.AUTO, which lets it vary if the model does."
                )
        lowest, highest = dict(limits.lowest), dict(limits.highest)
        for name, (low, high) in self.bounds.items():
            captured = limits.captured.get(name)
            if captured is not None and not (low or 0) <= captured <= (high if high is not None else captured):
                raise CaptureError(
                    f"dynamic_shapes says that {name} is from {low or 1} to {high}, but the example has {captured}.\n"
                    "Try: an example within the bounds."
                )
            if low is not None and low > 1:
                lowest[name] = max(lowest.get(name, 1), low)
            if high is not None:
                highest[name] = min(highest.get(name, high), high)
        return replace(limits, lowest=lowest, highest=highest)


def wanted_sizes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    rows: Sequence[InputDimension] = (),
) -> WantedSizes:
    """Read ``dynamic_shapes``.

    Args:
        model, args, kwargs: the model and the inputs of its example.
        rows: the dimensions that are declared to have the rows of the batch.
        dynamic_shapes: None lets every size vary that the model lets vary; False fixes all. Else as ``torch.export``
            takes it: for each argument, by its name or in the order of ``args``, the dimensions that vary, each with
            a ``Dim``, ``Dim.AUTO`` or a name; nested as the arguments are. All other dimensions are fixed.

    Raises:
        CaptureError: it does not fit the arguments.
    """
    if dynamic_shapes is None:
        return WantedSizes(names=SizeNames().with_rows(rows))
    if dynamic_shapes is False:
        return WantedSizes(fixed=None)
    by_name = dict(kwargs)
    names = argument_names(model, args)
    if isinstance(dynamic_shapes, Mapping):
        by_name = {**dict(zip(names, args, strict=False)), **by_name}
        unknown = next((name for name in dynamic_shapes if name not in by_name), None)
        if unknown is not None:
            hint = nearest(str(unknown), by_name)
            raise CaptureError(
                f"dynamic_shapes names {unknown!r}, which is no argument of the example.{hint}\n"
                f"Try: {', '.join(by_name)}."
            )
        specs = [dynamic_shapes.get(name) for name in names]
        keyword_specs = {name: dynamic_shapes.get(name) for name in kwargs}
    elif isinstance(dynamic_shapes, (tuple, list)) and len(dynamic_shapes) == len(args):
        specs, keyword_specs = list(dynamic_shapes), dict.fromkeys(kwargs)
    else:
        raise CaptureError(f"dynamic_shapes does not have an entry for each of {len(args)} arguments.\nTry: {_FORM}.")
    entries = [*zip(names, args, specs, strict=True), *((name, kwargs[name], keyword_specs[name]) for name in kwargs)]
    found = [tensor for entry in entries for tensor in _tensors(*entry)]
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(found) != len(positions):
        raise CaptureError(
            "dynamic_shapes cannot describe tensors in containers other than tuples, lists and dicts.\n"
            "Try: capture without it, which lets every size vary that the model lets vary."
        )
    wanted_by_dimension = [
        ((position, dim), f"{place}.shape[{dim}]", wanted.get(dim))
        for position, (place, tensor, wanted) in zip(positions, found, strict=True)
        for dim in range(tensor.dim())
    ]
    return _wanted(wanted_by_dimension, rows, first=(positions[0], 0) if positions else (0, 0))


def argument_names(model: nn.Module, args: tuple[Any, ...]) -> list[str]:
    """The names of positional arguments; ``args[0]`` where the model has none."""
    try:
        names = list(inspect.signature(model.forward).bind(*args).arguments)
    except (TypeError, ValueError):
        names = []
    return names if len(names) == len(args) else [f"args[{index}]" for index in range(len(args))]


def _tensors(place: str, value: Any, spec: Any) -> Iterator[tuple[str, torch.Tensor, Mapping[int, Any]]]:
    """(Place, tensor, dimension → what is wanted) for the tensors of an argument, in order."""
    if isinstance(value, torch.Tensor):
        yield place, value, _by_dimension(place, value, spec)
    elif isinstance(value, Mapping):
        specs = spec if isinstance(spec, Mapping) else {}
        for name, inner in value.items():
            yield from _tensors(f"{place}[{name!r}]", inner, specs.get(name))
    elif isinstance(value, (tuple, list)):
        entries = spec if isinstance(spec, (tuple, list)) and len(spec) == len(value) else [None] * len(value)
        for index, (inner, each) in enumerate(zip(value, entries, strict=True)):
            yield from _tensors(f"{place}[{index}]", inner, each)


def _by_dimension(place: str, tensor: torch.Tensor, spec: Any) -> Mapping[int, Any]:
    if spec is None:
        return {}
    if isinstance(spec, (tuple, list)) and len(spec) == tensor.dim():
        return dict(enumerate(spec))
    if isinstance(spec, Mapping) and all(isinstance(dim, int) and 0 <= dim < tensor.dim() for dim in spec):
        return spec
    raise CaptureError(f"dynamic_shapes has {spec!r} for {place}, which has {tensor.dim()} dimensions.\nTry: {_FORM}.")


def _wanted(
    found: Iterable[tuple[InputDimension, str, Any]], rows: Sequence[InputDimension], first: InputDimension
) -> WantedSizes:
    fixed: set[InputDimension] = set()
    names: dict[InputDimension, str] = {}
    bounds: dict[str, tuple[int | None, int | None]] = {}
    places: dict[InputDimension, str] = {}
    for dimension, place, wanted in found:
        name = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", None)
        if wanted is None or isinstance(wanted, int) or wanted == Dim.STATIC:
            fixed.add(dimension)
        elif isinstance(name, str):
            if not name.isidentifier():
                raise CaptureError(f"dynamic_shapes calls {place} {name!r}, which is no name in Python.\nTry: {_FORM}.")
            names[dimension] = name
            places[dimension] = place
            bounds[name] = (getattr(wanted, "min", None), _upper(getattr(wanted, "max", None)))
        elif wanted == Dim.DYNAMIC:
            places[dimension] = place
        elif wanted != Dim.AUTO:
            raise CaptureError(f"dynamic_shapes has {wanted!r} for {place}.\nTry: {_FORM}.")
    for dimension in rows or (() if BATCH in names.values() else (first,)):
        if (name := names.get(dimension, BATCH)) != BATCH:  # whatever the user calls it, it is cut into microbatches
            bounds[BATCH] = bounds.pop(name)
            names |= {other: BATCH for other in names if names[other] == name}
    declared = dict(rows)
    for (position, dim), name in names.items():
        if name == BATCH and declared.get(position, dim) != dim:
            raise CaptureError(
                f"dynamic_shapes calls {places[position, dim]} {BATCH}, and batch_dims says that the rows lie along "
                f"dimension {declared[position]}.\nTry: one of the two, or another name in dynamic_shapes."
            )
    own = SizeNames(names, by_user=bool(names)).with_rows(row for row in rows if row not in fixed)
    return WantedSizes(frozenset(fixed), own, bounds, places)


def _upper(bound: Any) -> int | None:
    """The largest size; None for torch's way to say that there is none."""
    return bound if isinstance(bound, int) and bound < 2**31 else None


class SizeGuards:
    """The relations that hold wherever an exported program is the model.

    Attributes:
        captured: size → its value at capture.
        required: the relations that the program depends on.
        assumed: relations that say no more than that a size is not 1, which ``torch.export`` takes for granted of each:
            ``n > 1``, ``m != m * n`` and ``m % (m * n) != 0``. The model may be the same where they do not hold.
    """

    def __init__(self, captured: Sizes, guards: Iterable[sympy.Basic]) -> None:
        self.captured = captured
        found = (relation for guard in guards for relation in self._relations(guard) if relation.free_symbols)
        relations = [relation for relation in found if not _is_evident(relation)]
        self.assumed = tuple(dict.fromkeys(filter(_is_about_one, relations)))
        self.required = tuple(relation for relation in dict.fromkeys(relations) if relation not in self.assumed)

    def allow(self, sizes: Sizes) -> bool:
        """Return whether the required relations hold for sizes; those left out are as at capture."""
        return all(self._holds(relation, sizes, if_undefined=False) for relation in self.required)

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
            left, symbol, right = relation.lhs, relation.rel_op, relation.rhs
            if left.is_Symbol and right.is_Integer and symbol in (">", ">="):
                lowest[str(left)] = max(lowest.get(str(left), 1), int(right) + (symbol == ">"))
            elif left.is_Symbol and right.is_Integer and symbol in ("<", "<="):
                highest[str(left)] = min(highest.get(str(left), 2**62), int(right) - (symbol == "<"))
            else:
                conditions[f"{expression_text(left)} {symbol} {expression_text(right)}"] = None
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
            held = [part for part in guard.args if self._holds(part, {}, if_undefined=False)]
            if held:
                yield from self._relations(min(held, key=lambda part: (len(part.free_symbols), str(part))))
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
        varying: (symbol, dimension, size in the example) of the inputs' sizes that vary, in the order of the inputs.
    """
    sizes: dict[sympy.Symbol, int] = {}
    same: dict[sympy.Symbol, sympy.Symbol] = {}
    for symbol, _, size in varying:
        sizes.setdefault(symbol, size)
    for guard in (each.xreplace(same) for each in guards):
        if not isinstance(guard, sympy.Eq):
            continue
        left, right = guard.args
        own, others = (
            [size for size in sizes if size in one.free_symbols - other.free_symbols]
            for one, other in ((left, right), (right, left))
        )
        pairs = dict(zip(own, others, strict=False))
        if [sizes[size] for size in own] != [sizes[size] for size in others]:
            continue
        if sympy.expand(left.xreplace(pairs) - right) == 0:
            order = list(sizes)
            same |= dict(sorted(pair, key=order.index, reverse=True) for pair in pairs.items())
    return same


def _is_size_or_one(part: sympy.Basic) -> bool:
    return type(part).__name__ == "Max" and len(part.args) == 2 and sympy.Integer(1) in part.args


def _without_one(part: sympy.Basic) -> sympy.Basic:
    return next(each for each in part.args if each != 1)


def _is_least(part: sympy.Basic) -> bool:
    return type(part).__name__ == "Min"


def _without_multiples(part: sympy.Basic) -> sympy.Basic:
    return part.func(*(each for each in part.args if not any(_is_multiple(each, other) for other in part.args)))


def _is_about_one(relation: sympy.Basic) -> bool:
    """Return whether a guard only says that a size is not 0 or 1, as the program takes for granted of each."""
    if not isinstance(relation, (Ne, Gt, Ge, Lt, Le)):
        return False
    left, right = relation.args
    if type(left).__name__ in ("Mod", "PythonMod"):
        return isinstance(relation, sympy.Ne) and right == 0 and _is_multiple(left.args[1], left.args[0])
    return any(side in (0, 1) for side in (left, right)) or _is_multiple(left, right) or _is_multiple(right, left)


def _is_multiple(size: sympy.Expr, other: sympy.Expr) -> bool:
    """Return whether a size is another one times further sizes."""
    quotient = size / other
    return bool(quotient.free_symbols) and quotient.as_numer_denom()[1] == 1
