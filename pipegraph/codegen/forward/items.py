"""What a generated ``forward`` is made of, in order: operations, calls of modules, loops over calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from pipegraph.codegen.expressions.attention_calls import Arguments
from pipegraph.codegen.names.identifiers import outer_names
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
    """A call ``self.fqn(reads…)`` that gives ``makes``; ``constructor`` is the text that builds the module,
    ``model_class`` the name of the model's own class, ``modules`` the FQNs of all modules that it builds. With
    ``arguments`` it is called with those instead of ``reads`` in their order."""

    fqn: str
    constructor: str
    model_class: str
    reads: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    modules: frozenset[str]
    arguments: Arguments | None = None

    @property
    def handed(self) -> tuple[fx.Node, ...]:
        """Values in the order in which they stand in the call."""
        if self.arguments is None:
            return self.reads
        return tuple(self.reads[position] for _, position in self.arguments.handed)


@dataclass(frozen=True)
class Alternate:
    """How a loop calls its modules in some turns.

    ``test`` tells the turns by the module's number, as ``{} % 6 == 5``; it ``holds_first`` where it holds for those
    that are like the first turn, and not for these. ``reads`` and ``carried`` are as in the loop, of a call in such a
    turn.
    """

    test: str
    holds_first: bool
    reads: tuple[fx.Node, ...]
    carried: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """Calls of modules of one class in a row, each fed by the one before.

    ``carried`` maps a position in ``reads`` to the position in ``makes`` of the call before; every other position takes
    the same value in each call, but for those that are like ``alternate``.
    """

    calls: tuple[ModuleCall, ...]
    carried: tuple[tuple[int, int], ...]
    alternate: Alternate | None = None

    @property
    def patterns(self) -> list[list[tuple[fx.Node, int | None]]]:
        """What the first call takes, and then one like ``alternate``: each value, and the position in ``makes`` of the
        one that stands there from the second turn on."""
        rows = [(self.calls[0].reads, dict(self.carried))]
        if self.alternate is not None:
            rows.append((self.alternate.reads, dict(self.alternate.carried)))
        return [[(node, carried.get(position)) for position, node in enumerate(reads)] for reads, carried in rows]

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


Item = Operation | ModuleCall | Loop


def modules_in(item: Item) -> frozenset[str]:
    """FQNs of the modules that an item builds."""
    if isinstance(item, Loop):
        return frozenset[str]().union(*(call.modules for call in item.calls))
    return item.modules if isinstance(item, ModuleCall) else frozenset()


def conflicts(items: Iterable[Item]) -> frozenset[str]:
    """Modules that are called twice in ways that one class cannot serve, and those of which a part is called beside."""
    constructors: dict[str, str] = {}
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
    return list(item.reads if isinstance(item, Loop) else item.handed)


def has_effects(item: Item) -> bool:
    """Whether the place of an item in the order matters: it draws random numbers or changes state."""
    return any(
        "writes" in node.meta or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for node in item.nodes
    )


@dataclass(frozen=True)
class Scope:
    """A class to be written.

    Attributes:
        prefix: FQN of the module that it stands for, "" for a stage.
        items: its ``forward``.
        inputs, outputs: what ``forward`` takes and returns.
        state: parameters and buffers by their name relative to ``prefix``.
        names: state nodes that it holds itself → relative name.
        regions: ``no_grad`` and ``autocast`` blocks that stand around the call and not in it.
    """

    prefix: str
    items: tuple[Item, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    state: dict[str, StateEntry]
    names: dict[fx.Node, str]
    regions: int = 0
