"""The role of each input of a model: rows of the batch, whole for every microbatch, or a list with one for each.

batch_dims={"mask": 0} ──────────────────┐
names of sizes, sizes that are equal ────┼─▶ a role for each tensor ─▶ proved by `row_proof`
inputs with the rows of the example ─────┘   (the assignment with which no operator mixes rows)
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor, fx, nn

from pipegraph.errors import CaptureError, nearest
from pipegraph.graph.batch.row_call import RowSizes
from pipegraph.graph.batch.row_proof import RowProof, prove_rows
from pipegraph.graph.batch.row_state import INVARIANT, LISTED, Rows, State
from pipegraph.graph.batch_report import BatchRole
from pipegraph.graph.export.dynamic_shapes import BATCH, argument_names
from pipegraph.graph.nodes import shape_of
from pipegraph.graph.symbolic_size import InputDimension, SymbolicSize
from pipegraph.torch_private.pytrees import pytree

# ---- conventions -----------------------------------------------------------------------------------------------------
# Roles that follow from the names of transformers' arguments, which the library uses for one thing alone.


_LISTS: Final = frozenset(
    ["image_grid_thw", "video_grid_thw", "pixel_values_videos", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"]
)
"""Arguments that describe the parts of one flat stream: no dimension of theirs is that of the rows."""


def conventional_roles(model: nn.Module, leaves: Sequence[tuple[str, Any]]) -> Iterator[tuple[int, BatchRole]]:
    """(Position, role) of the inputs of a transformers model whose names define their role.

    Image patches are one flat stream if their grids are also inputs. Otherwise there is one image for each row of text,
    if the numbers are equal. Positions of several axes are ``[axes, batch, length]``.

    Args:
        leaves: the name and the value of each leaf of the inputs.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    names = {name for name, _ in leaves}
    texts = (leaf for name, leaf in leaves if name in ("input_ids", "inputs_embeds") and isinstance(leaf, Tensor))
    rows = next((len(text) for text in texts), None)
    for position, (name, leaf) in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        is_stream = name == "pixel_values" and "image_grid_thw" in names and leaf.dim() == 2
        if name in _LISTS or is_stream:
            yield position, BatchRole("list")
        elif name == "position_ids" and leaf.dim() == 3:
            yield position, BatchRole("rows", 1)
        elif name == "pixel_values" and leaf.shape[0] == rows:
            yield position, BatchRole("rows", 0)


# ---- roles -----------------------------------------------------------------------------------------------------------


TARGET: Final = "target"
"""The name under which ``batch_dims`` says where the rows of a target are."""

_MOST: Final = 32  # assignments that are tried
_FORM: Final = 'batch_dims={"tokens": 0, "table": None, "cu_seqlens": "list"}'


@dataclass(frozen=True)
class DeclaredRoles:
    """The roles that a user declared, or that follow from a convention, by the position of the tensor.

    Attributes:
        target_dim: the dimension along which the target has its rows; None if it was not declared.
    """

    roles: Mapping[int, BatchRole] = field(default_factory=dict)
    target_dim: int | None = None

    @property
    def rows(self) -> list[InputDimension]:
        """The dimensions of inputs that have rows because the user says so."""
        return [(at, role.dim) for at, role in self.roles.items() if role.dim is not None and role.declared]

    @property
    def dims(self) -> dict[int, int | None]:
        """Position of an input → the dimension of its rows; None if it has none."""
        return {at: role.dim for at, role in self.roles.items()}


def declared_roles(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dims: Mapping[str, Any] | None
) -> DeclaredRoles:
    """Read ``batch_dims``.

    Args:
        model, args, kwargs: the model and the inputs of its example.
        batch_dims: the name of an argument, or of a tensor in it (``batch.image``), → the dimension of its rows, None
            or "whole", "list", or a nesting of these like that of the argument.

    Raises:
        CaptureError: it names no input, or a dimension that the input does not have.
    """
    places = list(_leaf_names(argument_names(model, args), args, kwargs))
    roles = dict(conventional_roles(model, [(names[-1], leaf) for names, leaf in places]))
    target_dim: int | None = None
    if batch_dims is not None and not isinstance(batch_dims, Mapping):
        raise CaptureError(f"batch_dims is a {type(batch_dims).__name__}; it has a role for each input.", f"{_FORM}.")
    for name, value in _flat(batch_dims or {}):
        if name == TARGET and not any(name in (names[0], *names) for names, _ in places):
            if type(value) is not int or value < 0:
                raise CaptureError(f"batch_dims has {value!r} for the target.", "the dimension of its rows, from 0.")
            target_dim = value
            continue
        positions = [at for at, (names, leaf) in enumerate(places) if name in names and isinstance(leaf, Tensor)]
        if not positions:
            tensors = list(dict.fromkeys(names[-1] for names, leaf in places if isinstance(leaf, Tensor)))
            raise CaptureError(
                f"batch_dims names {name!r}, which is not a tensor of the example.{nearest(name, tensors)}",
                f"{', '.join(tensors)}.",
            )
        for at in positions:
            roles[at] = _role(places[at][0][-1], places[at][1], value)
    return DeclaredRoles(roles, target_dim)


def _flat(roles: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each role of a nesting, with the name of its input: ``batch.image``."""
    items = roles.items() if isinstance(roles, Mapping) else enumerate(roles)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, (Mapping, list, tuple)):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _leaf_names(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[list[str], Any]]:
    """For each leaf of the inputs, the names under which it may be declared: its argument's first, its own last."""
    for path, leaf in pytree.tree_flatten_with_path((args, dict(kwargs)))[0]:
        keys: list[Any] = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))) for key in path]
        is_positional, argument, path_inside = keys[0] == 0, keys[1], keys[2:]
        parts = [names[argument] if is_positional else str(argument), *map(str, path_inside)]
        yield [*(".".join(parts[:end]) for end in range(1, len(parts))), "_".join(parts), ".".join(parts)], leaf


def _role(name: str, tensor: Tensor, value: Any) -> BatchRole:
    if value is None or value == "whole":
        return BatchRole("whole", declared=True)
    if value == "list":
        return BatchRole("list", declared=True)
    if type(value) is int and -tensor.dim() <= value < tensor.dim():
        return BatchRole("rows", value % tensor.dim(), declared=True)
    raise CaptureError(
        f"batch_dims has {value!r} for {name}, which has {tensor.dim()} dimensions.",
        'the dimension of its rows, "whole" if every microbatch takes all of it, or "list".',
    )


@dataclass(frozen=True)
class InputTensor:
    """A tensor among the inputs.

    Attributes:
        node: its placeholder.
        position: among the leaves of the inputs.
    """

    node: fx.Node
    position: int

    @property
    def label(self) -> str:
        return str(self.node.target)


@dataclass(frozen=True)
class RoleAssignment:
    """A role for each input, and what the rules say of it.

    Attributes:
        roles: label of an input → its role.
        names: dimension of an input → ``batch``, for all that have rows and vary.
        sizes: at which rows are told apart.
        fixed: the dimensions of rows, if those of one input do not vary, so that those of no other may.
        suggestion: the role ``name=dimension`` with which no operator mixes rows, if there is such a dimension.
    """

    roles: Mapping[str, BatchRole]
    names: Mapping[InputDimension, str]
    sizes: RowSizes
    fixed: frozenset[InputDimension] = frozenset()
    suggestion: str = ""

    def renamed(self, captured: Mapping[str, int]) -> RoleAssignment:
        """The same for a graph in which the size of all rows is called ``batch``."""
        return replace(self, sizes=self.sizes.renamed(captured)) if self.names else self

    def prove(self, graph: fx.Graph) -> RowProof:
        """Find the rows of every value of a graph with these inputs."""
        return prove_rows(
            graph, {label: self._state(graph, label, role) for label, role in self.roles.items()}, self.sizes
        )

    def _state(self, graph: fx.Graph, label: str, role: BatchRole) -> State:
        if role.dim is None:
            return LISTED if role.kind == "list" else INVARIANT
        node = next(node for node in graph.find_nodes(op="placeholder") if str(node.target) == label)
        return Rows(role.dim, max(self.sizes.shape(node)[role.dim] // self.sizes.rows, 1))


def assign_roles(
    graph: fx.Graph,
    inputs: Sequence[InputTensor],
    captured: Mapping[str, int],
    declared: DeclaredRoles,
    named: Mapping[InputDimension, str],
) -> RoleAssignment:
    """Find a role for each input: the declared one, or one with which no operator mixes rows.

    Args:
        graph: of the model, with its usual names of sizes.
        inputs: its tensors.
        captured: size → its number at capture.
        declared: roles.
        named: names that the user gave to sizes. Two names are two sizes.
    """
    reference = next(iter(declared.rows), None) or next((at for at, name in named.items() if name == BATCH), None)
    first = _Assigner(graph, inputs, captured, declared, named, reference or (inputs[0].position if inputs else 0, 0))
    best, score = first.best()
    if score != (0, 0) and not declared.roles:
        best = replace(best, fixed=frozenset())  # no size is fixed for a role that is not proved
    if reference is None and score[0] and inputs:
        position = inputs[0].position
        for dim in range(1, len(shape_of(inputs[0].node))):
            alternative = _Assigner(graph, inputs, captured, declared, named, (position, dim))
            if alternative.varies and alternative.best()[1] == (0, 0):
                suggestion = f"{inputs[0].label}={dim}"
                return replace(best, suggestion=suggestion)
    return best


class _Assigner:
    """The assignments with the rows of one input along one dimension."""

    def __init__(
        self,
        graph: fx.Graph,
        inputs: Sequence[InputTensor],
        captured: Mapping[str, int],
        declared: DeclaredRoles,
        named: Mapping[InputDimension, str],
        reference: InputDimension,
    ) -> None:
        self._graph, self._inputs, self._captured, self._declared, self._named = (
            graph,
            inputs,
            captured,
            declared,
            named,
        )
        tensor = next((tensor for tensor in inputs if tensor.position == reference[0]), None)
        shape = () if tensor is None else shape_of(tensor.node)
        size = shape[reference[1]] if reference[1] < len(shape) else None
        self._symbols = set(map(str, size.symbols)) if isinstance(size, SymbolicSize) else set()
        self._rows = None if size is None else int(size)
        self._reference = reference
        for position, dim in declared.rows:  # rows of different names are one size because the user says so
            declared_size = self._size(position, dim)
            if (
                isinstance(declared_size, SymbolicSize)
                and len(declared_size.symbols) == 1
                and int(declared_size) == self._rows
            ):
                self._symbols |= set(map(str, declared_size.symbols))
        self.varies = bool(self._symbols)

    def _size(self, position: int, dim: int) -> int:
        return next(shape_of(tensor.node)[dim] for tensor in self._inputs if tensor.position == position)

    def best(self) -> tuple[RoleAssignment, tuple[int, int]]:
        """The assignment with the fewest operators that mix rows, or have no rule, and how many of both there are."""
        best: tuple[RoleAssignment, tuple[int, int]] | None = None
        options = [self._options(tensor) for tensor in self._inputs]
        for roles in itertools.islice(itertools.product(*options), _MOST):
            assignment = self._assignment(roles)
            proof = assignment.prove(self._graph)
            score = len(proof.certain), int(bool(proof.undecided))
            if best is None or score < best[1]:
                best = assignment, score
            if score == (0, 0):
                break
        assert best is not None
        return best

    def _options(self, tensor: InputTensor) -> list[BatchRole]:
        """The roles that an input may have, the likeliest first."""
        if tensor.position in self._declared.roles:
            return [self._declared.roles[tensor.position]]
        shape = shape_of(tensor.node)
        if tensor.position == self._reference[0] and shape:
            return [BatchRole("rows", self._reference[1])]
        if self._symbols:
            of_batch = [dim for dim, size in enumerate(shape) if self._is_batch(size)]
            if of_batch:
                return [BatchRole("rows", of_batch[0])]
        lengths = self._other_sizes()
        dims = [
            dim
            for dim, size in enumerate(shape)
            if int(size) == self._rows
            and (isinstance(size, SymbolicSize) or not self.varies)
            and (not isinstance(size, SymbolicSize) or not lengths & set(map(str, size.symbols)))
            and self._named.get((tensor.position, dim), BATCH) == BATCH
        ]
        return [*(BatchRole("rows", dim) for dim in dims), BatchRole("whole")]

    def _is_batch(self, size: int) -> bool:
        return isinstance(size, SymbolicSize) and not self._symbols.isdisjoint(map(str, size.symbols))

    def _other_sizes(self) -> set[str]:
        """The sizes of the first input with rows that are not its rows, such as its length."""
        shape = next((shape_of(tensor.node) for tensor in self._inputs if tensor.position == self._reference[0]), ())
        symbols = (map(str, size.symbols) for size in shape if isinstance(size, SymbolicSize))
        return set(itertools.chain.from_iterable(symbols)) - self._symbols

    def _assignment(self, roles: Sequence[BatchRole]) -> RoleAssignment:
        names: dict[InputDimension, str] = {}
        symbols = set(self._symbols)
        for tensor, role in zip(self._inputs, roles, strict=True):
            size = None if role.dim is None else shape_of(tensor.node)[role.dim]
            if role.dim is not None and isinstance(size, SymbolicSize) and size.expression.is_Symbol and self.varies:
                names[tensor.position, role.dim] = BATCH
                symbols.add(str(size.expression))
        sizes = RowSizes(self._captured, symbols if self.varies else (), self._rows)
        by_label = {tensor.label: role for tensor, role in zip(self._inputs, roles, strict=True)}
        return RoleAssignment(by_label, names, sizes, self._not_varying(roles))

    def _not_varying(self, roles: Sequence[BatchRole]) -> frozenset[InputDimension]:
        """The dimensions of rows, if some of them vary and others do not."""
        rows = [
            ((tensor.position, role.dim), shape_of(tensor.node)[role.dim])
            for tensor, role in zip(self._inputs, roles, strict=True)
            if role.dim is not None
        ]
        varying = frozenset(dimension for dimension, size in rows if isinstance(size, SymbolicSize))
        return frozenset(dict(rows)) if 0 < len(varying) < len(rows) else frozenset()
