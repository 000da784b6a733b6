"""The program of a model: exported, with the dynamic sizes, and those for which it is not the model."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import sympy
import torch
from torch import Tensor, fx, nn

from pipegraph.errors import CaptureError, is_user_file
from pipegraph.graph.captured import StateEntry
from pipegraph.graph.export.dynamic_shapes import SizeNames, WantedSizes
from pipegraph.graph.export.flatten import flatten
from pipegraph.graph.export.input_sizes import InputSizes
from pipegraph.graph.export.kept_sizes import may_read_int
from pipegraph.graph.export.operation_record import Operations, operations_of_model, operations_of_program
from pipegraph.graph.export.shape_expression_limit import FixedSizeNeededError
from pipegraph.graph.export.size_guards import SizeGuards, Sizes
from pipegraph.graph.export.torch_export import Exported, IntOfSizeError, export
from pipegraph.graph.index_bounds import RangeLimit, range_limits
from pipegraph.graph.model_structure import state_of
from pipegraph.graph.nodes import source_line
from pipegraph.graph.symbolic_size import InputDimension, SizeLimits
from pipegraph.torch_private.pytrees import pytree

# ---- remainders ------------------------------------------------------------------------------------------------------
# Sizes that a model pads to a multiple of a chunk: whether its program holds with and without padding.
#
# ``torch.export`` follows the branch of the example in ``if pad > 0: y = y[:, :length]``, and notes ``pad > 0``. At a
# length that needs no padding, the slice takes everything, and the operations are the same ones. The model and the
# program are therefore compared at such lengths, as for sizes of 1; a relation that no comparison contradicts is left
# out.


def without_remainders(guards: SizeGuards, is_same: Callable[[Sizes], bool]) -> SizeGuards:
    """Return the guards without those that the model does not depend on.

    Args:
        guards: of a program.
        is_same: whether the program does what the model does at some sizes.
    """
    candidates = frozenset(relation for relation in guards.required if _is_about_remainder(relation))
    if not candidates:
        return guards
    samples: dict[frozenset[sympy.Basic], list[Sizes]] = {}  # by the relations that do not hold there
    for sizes in _samples(guards, candidates):
        failing = guards.failing(sizes)
        if failing and failing <= candidates:
            samples.setdefault(failing, []).append(sizes)
    required: set[sympy.Basic] = set()
    for failing, lengths in samples.items():
        # A comparison of a large model takes seconds: that of the shortest and of the longest says most.
        if not (is_same(lengths[0]) and is_same(lengths[-1])):
            required |= failing
    return guards.without(frozenset().union(*samples) - required)


def sizes_of_some_remainders(guards: SizeGuards) -> Iterator[sympy.Symbol]:
    """Yield the sizes that a program allows only with some remainders: multiples of a chunk, for example."""
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


# ---- trace -----------------------------------------------------------------------------------------------------------


NO_ROLES: Final[Mapping[int, int | None]] = MappingProxyType({})


class Example(NamedTuple):
    """The inputs of one microbatch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[tuple[int, Tensor]]:
        """The tensors among the leaves, each with its position."""
        return [(position, leaf) for position, leaf in enumerate(pytree.tree_leaves(self)) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Trace:
    """A model's program.

    Attributes:
        example: the inputs it was traced on.
        exported: the program of ``torch.export``.
        graph: the program as one flat graph, before any pass.
        state, tensors: the parameters, buffers and constants of the graph.
        sizes: those of the inputs that vary.
        guards: what the program takes for granted of them.
        comparison: of the program and the model.
        names: of the sizes.
    """

    example: Example
    exported: Exported
    graph: fx.Graph
    state: dict[str, StateEntry]
    tensors: dict[str, Tensor]
    sizes: InputSizes
    guards: SizeGuards
    comparison: ProgramComparison
    names: SizeNames

    def renamed(self, model: nn.Module, names: SizeNames) -> Trace:
        """The same program with other names of sizes."""
        state, tensors = state_of(model)
        graph, sizes = flatten(self.exported.program, state, tensors, names)
        guards = sizes.guards(limit.relation for limit in range_limits(graph))
        comparison = ProgramComparison(self.exported, sizes, model, *self.example)
        guards = without_remainders(guards, comparison.is_same)
        return Trace(self.example, self.exported, graph, state, tensors, sizes, guards, comparison, names)

    def is_model_at(self, sizes: Mapping[sympy.Symbol, int]) -> bool:
        """Return whether the program does what the model does, at other sizes than those of the example."""
        return self.guards.allow(sizes) and self.comparison.is_same(sizes)

    def limits(self, captured: Mapping[sympy.Symbol, int]) -> SizeLimits:
        """What holds of the sizes.

        Args:
            captured: the sizes at capture.
        """
        limits = limits_of(self.guards, self.comparison)
        return replace(limits, captured={str(symbol): size for symbol, size in captured.items()})

    def sizes_of(self, example: Example, batch: int | None, seq: int | None) -> dict[sympy.Symbol, int]:
        """The dynamic sizes of an example, with other rows and tokens: dimensions 0 and 1 of its first tensor.

        Raises:
            CaptureError: the model does not take these sizes.
        """
        sizes = self.sizes.values_in(example)
        options = [(name, dim, size) for name, dim, size in (("batch", 0, batch), ("seq", 1, seq)) if size is not None]
        tensors = example.tensors()
        first, shape = (tensors[0][0], list(tensors[0][1].shape)) if tensors else (0, [])
        for name, dim, size in options:
            if shape[dim : dim + 1] == [size]:
                continue
            symbol = self.sizes.symbol_of((first, dim)) if tensors else None
            if symbol is None:
                raise CaptureError(
                    f"--{name} {size} does not fit: dimension {dim} of the first input, {shape}, does not vary.",
                    f"without --{name}, or an example of that size.",
                )
            sizes[symbol] = size
        if options and not self.is_model_at(sizes):
            flags = ", ".join(f"--{name} {size}" for name, _, size in options)
            conditions = _what_holds(limits_of(self.guards, self.comparison)) or "other sizes"
            raise CaptureError(f"The model does not take {flags}.", f"{conditions}.")
        return sizes


def trace(
    model: nn.Module,
    example: Example,
    request: WantedSizes,
    trains: bool = True,
    roles: Mapping[int, int | None] = NO_ROLES,
) -> Trace:
    """Export a model, with every size that may vary.

    ``torch.export`` lets no size of 1 vary. A batch of 1 is therefore traced with 2 rows, if the program is the model
    with 1 row as well.

    Args:
        trains: whether to try training mode.
        roles: position of an input whose role is declared → the dimension of its rows; None if it has none.

    Raises:
        CaptureError: the model cannot be exported.
    """
    for singleton_dims in _sizes_of_one(example, request, roles):
        doubled_trace = _trace_doubled(model, example, singleton_dims, request, trains)
        if doubled_trace is not None:
            return doubled_trace
    traced = _trace(model, example, request, trains)
    for symbol in sizes_of_some_remainders(traced.guards):
        padded = _trace_padded(traced, symbol, model, example, request, trains)
        if padded is not None:
            return padded
    return traced


def _trace(
    model: nn.Module, example: Example, request: WantedSizes, trains: bool, first_export: Exported | None = None
) -> Trace:
    """Export a model.

    Args:
        first_export: the model exported on an example of other sizes, which fixed the same sizes.
    """
    args, kwargs = example
    fixed = request.fixed if first_export is None else first_export.fixed
    computed: dict[InputDimension, str] = {} if first_export is None else dict(first_export.computed)
    keeps_int = first_export is not None and first_export.keeps_int
    may_keep_int = not keeps_int
    while True:
        try:
            exported = export(
                model,
                args,
                kwargs,
                fixed,
                free_dims=request.places.keys(),
                trains=trains,
                keeps_int=keeps_int,
                may_keep_int=may_keep_int,
            )
            lines = (*exported.lines.values(), exported.obstacle)
            if may_keep_int and any(line and may_read_int(model, line) for line in lines):
                keeps_int, may_keep_int = True, False
                continue
            exported, fixed = exported._replace(computed=computed), exported.fixed
            state, tensors = state_of(model)
            graph, sizes = flatten(exported.program, state, tensors, request.names)
            limits = tuple(range_limits(graph))
            guards = sizes.guards(limit.relation for limit in limits)
            break
        except IntOfSizeError:
            keeps_int, may_keep_int = True, False
        except CaptureError:
            if not keeps_int:
                raise
            keeps_int = False  # the model asks more of the type than a size does
        except FixedSizeNeededError as error:
            if may_keep_int and may_read_int(model, error.line):
                keeps_int, may_keep_int = True, False
                continue
            fixed = None if fixed is None or error.dimensions <= fixed else fixed | error.dimensions
            computed |= dict.fromkeys(error.dimensions - computed.keys(), error.line)
    _check_tables(limits, sizes.values_in(example))
    comparison = ProgramComparison(exported, sizes, model, args, kwargs)
    guards = without_remainders(guards, comparison.is_same)
    return Trace(example, exported, graph, state, tensors, sizes, guards, comparison, request.names)


def _check_tables(limits: Iterable[RangeLimit], captured: Sizes) -> None:
    """Raise CaptureError if a table has fewer rows than the example reads. Nothing notices it where values are fake."""
    for limit in limits:
        length = int(limit.length.xreplace({symbol: sympy.Integer(size) for symbol, size in captured.items()}))
        if length > limit.rows:
            allowed = (
                f"{limit.relation.lhs} of at most {limit.relation.rhs}" if limit.relation.args else "smaller sizes"
            )
            raise CaptureError(
                f"The model reads row {length - 1} of a table that has {limit.rows} rows.\n"
                f"  at {source_line(limit.node)}",
                f"an example with {allowed}, or a larger table.",
            )


def _trace_doubled(
    model: nn.Module,
    example: Example,
    singleton_dims: AbstractSet[InputDimension],
    request: WantedSizes,
    trains: bool,
) -> Trace | None:
    """Trace a model with sizes of 2 in place of 1; None if one of them does not vary, or may not be 1."""
    leaves, form = pytree.tree_flatten(example)
    for position, dim in sorted(singleton_dims):
        leaves[position] = torch.cat([leaves[position].detach()] * 2, dim)
    with warnings.catch_warnings(record=True) as caught:
        try:
            doubled_trace = _trace(model, pytree.tree_unflatten(leaves, form), request, trains)
        except CaptureError:
            return None
    symbols = {doubled_trace.sizes.symbol_of(dimension) for dimension in singleton_dims}
    if None in symbols:
        return None
    # `limits_of` asks for all sizes of 1 together, and a comparison of a large model takes seconds.
    every = {symbol: 1 for symbol in doubled_trace.guards.captured if doubled_trace.guards.allow({symbol: 1})}
    alone = {symbol: 1 for symbol in symbols if symbol is not None}
    if not (alone.keys() <= every.keys() and doubled_trace.is_model_at(every)) and not doubled_trace.is_model_at(alone):
        return None
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return doubled_trace


def _trace_padded(
    traced: Trace,
    symbol: sympy.Symbol,
    model: nn.Module,
    example: Example,
    request: WantedSizes,
    trains: bool,
) -> Trace | None:
    """Trace a model with a size that is one more, and no multiple of a chunk; None if that says no more of the size."""
    leaves, form = pytree.tree_flatten(example)
    for position, leaf in example.tensors():
        for dim in range(leaf.dim()):
            if traced.sizes.symbol_of((position, dim)) == symbol:
                leaf = torch.cat([leaf.detach(), leaf.detach().narrow(dim, 0, 1)], dim)
        leaves[position] = leaf
    args, kwargs = pytree.tree_unflatten(leaves, form)
    try:
        operations_of_model(model, traced.exported.mode, args, kwargs)  # takes a tenth of the time of an export
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were shown for the example
            padded = _trace(model, Example(args, kwargs), request, trains, traced.exported)
    except Exception:  # whatever the model raises for a length that it does not take
        return None
    size = {symbol: traced.sizes.values_in(example)[symbol]}
    return padded if symbol in padded.guards.captured and padded.is_model_at(size) else None


def _sizes_of_one(
    example: Example, request: WantedSizes, roles: Mapping[int, int | None]
) -> Iterator[frozenset[InputDimension]]:
    """The dimensions of size 1 that may stand for a batch, or have to vary: those of all tensors, then of the first."""
    if request.fixed is None:
        return
    tensors = example.tensors()
    singleton_dims = [(at, dim) for at, leaf in tensors for dim, size in enumerate(leaf.shape) if size == 1]
    required_dims = frozenset(request.places).intersection(singleton_dims)
    batch = [(at, dim) for at, dim in singleton_dims if dim == roles.get(at, 0) and (at, dim) not in request.fixed]
    rows = [(at, dim) for at, dim in roles.items() if dim is not None]
    first = rows[0] if rows else (tensors[0][0], 0) if tensors else None
    if first in batch:
        yield required_dims.union(batch)
        certain = {first, *rows}.intersection(batch)
        if len(batch) > len(certain):
            yield required_dims | certain
    elif required_dims:
        yield required_dims


def _what_holds(limits: SizeLimits) -> str:
    """``tokens_1 from 2 to 64 and tokens_1 % 4 == 0``."""
    bounded = [name for name in limits.captured if name in limits.lowest or name in limits.highest]
    ends = ((name, limits.lowest.get(name, 1), limits.highest.get(name)) for name in bounded)
    bounds = (f"{name} from {low} to {high}" if high else f"{name} of {low} or more" for name, low, high in ends)
    return " and ".join((*bounds, *limits.conditions))


def limits_of(guards: SizeGuards, comparison: ProgramComparison) -> SizeLimits:
    """The bounds and conditions of the sizes for which a program is the model.

    ``torch.export`` takes for granted that no size is 1, because 1 is broadcast, and notes nothing of a branch such as
    ``if x.shape[1] > 1``. The model and the program are therefore run at sizes of 1, and compared operation by
    operation. If they differ, such a size is left out.
    """
    alone: list[Sizes] = [{symbol: 1} for symbol in guards.captured]
    sizes = {symbol: 1 for candidate in alone if guards.allow(candidate) for symbol in candidate}
    differ: list[sympy.Basic] = []
    if sizes and (not guards.allow(sizes) or not comparison.is_same(sizes)):
        differ = [symbol > 1 for symbol in sizes if not comparison.is_same({symbol: 1})]
        if not differ and guards.allow(sizes):
            # Two may be 1 one at a time. Which of more may be was not tried.
            differ = [sympy.Ne(sympy.prod(sizes), 1)] if len(sizes) == 2 else [symbol > 1 for symbol in sizes]
    exceptions = {relation: guards.exception(relation) for relation in guards.assumed}
    differ += [guard for guard, values in exceptions.items() if values is not None and not comparison.is_same(values)]
    return guards.limits(differ)


class ProgramComparison:
    """A model and its program, compared at several sizes."""

    def __init__(
        self, exported: Exported, sizes: InputSizes, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._exported, self._sizes, self._model, self._inputs = exported, sizes, model, (args, kwargs)
        self._results: dict[frozenset[tuple[sympy.Symbol, int]], bool] = {}

    def is_same(self, sizes: Sizes) -> bool:
        """Return whether the program does what the model does, at sizes that the program allows."""
        key = frozenset(sizes.items())
        if key not in self._results:
            self._results[key] = self._compare(sizes)
        return self._results[key]

    def _compare(self, sizes: Sizes) -> bool:
        try:
            model_operations = self._of_model(sizes)
        except Exception as error:
            # What torch refuses (a kernel larger than the image) it refuses in a stage too. What the model refuses
            # itself, a stage would compute.
            return not is_user_file(traceback.extract_tb(error.__traceback__)[-1].filename)
        try:
            program_operations = self._of_program(sizes)
            return model_operations == program_operations or self._without_dead(model_operations) == program_operations
        except Exception:  # whatever an operation raises on sizes that are not those of the model
            return False

    def _of_model(self, sizes: Sizes) -> Operations:
        return operations_of_model(self._model, self._exported.mode, *self._sizes.arguments_at(sizes, *self._inputs))

    def _of_program(self, sizes: Sizes) -> Operations:
        return operations_of_program(
            self._exported.program, self._model, *self._sizes.arguments_at(sizes, *self._inputs)
        )

    def _without_dead(self, operations: Operations) -> Operations | None:
        """The operations of the model without those that the program leaves out at the captured sizes, because nothing
        reads their results."""
        model_operations, program_operations = self._of_model({}), iter(self._of_program({}))
        next_operation = next(program_operations, None)
        positions = []
        for position, operation in enumerate(model_operations):
            if operation == next_operation:
                positions.append(position)
                next_operation = next(program_operations, None)
        if next_operation is not None or len(operations) != len(model_operations):
            return None
        return [operations[position] for position in positions]
