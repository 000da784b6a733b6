"""What a generated ``forward`` is made of, in order: operations, calls of modules, loops over calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from pipegraph.codegen.expressions.index_tests import IndexTest
from pipegraph.codegen.expressions.torch_modules import CallArguments
from pipegraph.codegen.names.identifiers import outer_names
from pipegraph.codegen.syntax.expressions import FunctionCall
from pipegraph.graph.captured import StateEntry


@dataclass(frozen=True, eq=False)
class Operation:
    """One ATen operation."""

    node: fx.Node

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """Values that it takes."""
        return tuple(self.node.all_input_nodes)

    @property
    def makes(self) -> tuple[fx.Node, ...]:
        """Values that it gives."""
        return (self.node,)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Operations in it."""
        return (self.node,)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A call of a module: ``makes = self.fqn(reads…)``.

    Attributes:
        fqn: of the module.
        constructor: builds the module.
        model_class: name of the model's own class.
        reads: values that it takes, in the order of the arguments.
        makes: values that it gives, in the order of the results.
        nodes: operations in it.
        modules: FQNs of all modules that ``constructor`` builds.
        arguments: how the values stand in the call, if not one after the other.
    """

    fqn: str
    constructor: FunctionCall
    model_class: str
    reads: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    modules: frozenset[str]
    arguments: CallArguments | None = None

    @property
    def argument_values(self) -> tuple[fx.Node, ...]:
        """Values in the order in which they stand in the call; one may stand there twice."""
        if self.arguments is None:
            return self.reads
        return tuple(self.reads[position] for _, position in self.arguments.values)


@dataclass(frozen=True)
class AlternateCall:
    """How a loop calls its modules in some iterations.

    Attributes:
        test: tells the iterations apart by the module's number.
        holds_first: whether the test holds for the iterations that are like the first one, and not for these.
        reads, carried: as in the loop, of a call in such an iteration.
    """

    test: IndexTest
    holds_first: bool
    reads: tuple[fx.Node, ...]
    carried: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class ModuleLoop:
    """Consecutive calls of modules of one class, each fed by the one before.

    Attributes:
        calls: one per iteration.
        carried: (position in ``reads``, position in ``makes`` of the call before that it takes). Every other position
            takes the same value in each iteration that is like the first one.
        alternate: how the other iterations call their modules, if there are any.
    """

    calls: tuple[ModuleCall, ...]
    carried: tuple[tuple[int, int], ...]
    alternate: AlternateCall | None = None

    @property
    def patterns(self) -> list[list[tuple[fx.Node, int | None]]]:
        """The arguments of the first call, and then of an alternate one: each value, and the position in ``makes`` of
        the one that takes its place from the second iteration on."""
        calls = [(self.calls[0].reads, dict(self.carried))]
        if self.alternate is not None:
            calls.append((self.alternate.reads, dict(self.alternate.carried)))
        return [[(node, carried.get(position)) for position, node in enumerate(reads)] for reads, carried in calls]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """Values that come from outside: those of the first call, then what others take in their place."""
        first, *others = self.patterns
        return (*(node for node, _ in first), *(node for other in others for node, made in other if made is None))

    @property
    def makes(self) -> tuple[fx.Node, ...]:
        """Values that the last call leaves."""
        return self.calls[-1].makes

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Operations in it."""
        return tuple(node for call in self.calls for node in call.nodes)


Item = Operation | ModuleCall | ModuleLoop


def fqn_of(item: Item) -> str | None:
    """The module that an item calls; of a loop, the first one."""
    if isinstance(item, Operation):
        return None
    return item.calls[0].fqn if isinstance(item, ModuleLoop) else item.fqn


def modules_in(item: Item) -> frozenset[str]:
    """FQNs of the modules that an item builds."""
    if isinstance(item, ModuleLoop):
        return frozenset[str]().union(*(call.modules for call in item.calls))
    return item.modules if isinstance(item, ModuleCall) else frozenset()


def conflicts(items: Iterable[Item]) -> frozenset[str]:
    """Modules that cannot be called as wholes: one class cannot serve two of their calls, or a part of them is also
    called from outside."""
    constructors: dict[str, FunctionCall] = {}
    found = set()
    for item in items:
        if isinstance(item, ModuleCall) and constructors.setdefault(item.fqn, item.constructor) != item.constructor:
            found.add(item.fqn)
    found.update(outer for inner in constructors for outer in outer_names(inner) if outer in constructors)
    return frozenset(found)


def operands(item: Item) -> list[fx.Node]:
    """Values that an item mentions, as often as it does."""
    if isinstance(item, Operation):
        found: list[fx.Node] = []
        fx.map_arg((item.node.args, item.node.kwargs), found.append)
        return found
    return list(item.reads if isinstance(item, ModuleLoop) else item.argument_values)


def has_effects(item: Item) -> bool:
    """Whether the place of an item in the order matters: it draws random numbers or changes state."""
    return any(
        "writes" in node.meta or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for node in item.nodes
    )


@dataclass(frozen=True)
class ClassContents:
    """What a class holds and does.

    Attributes:
        prefix: FQN of the module that it stands for, "" for a stage.
        items: its ``forward``.
        inputs, outputs: what ``forward`` takes and returns.
        state: parameters and buffers by their name relative to ``prefix``.
        state_names: state that ``forward`` reads itself → relative name.
        outer_regions: how many ``no_grad`` and ``autocast`` blocks stand around the call and not in it.
    """

    prefix: str
    items: tuple[Item, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    state: dict[str, StateEntry]
    state_names: dict[fx.Node, str]
    outer_regions: int = 0
