"""What a generated ``forward`` is made of, in order: operations, calls of modules, loops over calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from pipegraph.codegen.attention import Arguments
from pipegraph.codegen.names import is_number, is_within
from pipegraph.graph.captured import State


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


@dataclass(frozen=True, eq=False)
class Loop:
    """Calls of modules of one class in a row, each fed by the one before.

    ``carried`` maps a position in ``reads`` to the position in ``makes`` of the call before; every other position takes
    the same value in each call.
    """

    calls: tuple[ModuleCall, ...]
    carried: tuple[tuple[int, int], ...]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """Values that come from outside."""
        return self.calls[0].reads

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
    found.update(outer for outer in constructors if any(is_within(inner, outer) for inner in constructors))
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
    state: dict[str, State]
    names: dict[fx.Node, str]
    regions: int = 0


def roll(items: Sequence[Item], outputs: Iterable[fx.Node]) -> tuple[Item, ...]:
    """Turn rows of like calls into loops, the longest first in order."""
    rolled: list[Item] = []
    position = 0
    while position < len(items):
        stop = _end_of_row(items, position)
        while stop - position > 1 and not _private(items, position, stop, outputs):
            stop -= 1
        if stop - position > 1:
            calls = tuple(item for item in items[position:stop] if isinstance(item, ModuleCall))
            rolled.append(Loop(calls, _carried(calls[0], calls[1])))
            position = stop
        else:
            rolled.append(items[position])
            position += 1
    return tuple(rolled)


def _end_of_row(items: Sequence[Item], start: int) -> int:
    """Behind the last call that continues the row which begins at ``start``."""
    first = items[start]
    if not isinstance(first, ModuleCall):
        return start + 1
    stop, pattern = start + 1, None
    while stop < len(items):
        before, after = items[stop - 1], items[stop]
        if not isinstance(before, ModuleCall) or not isinstance(after, ModuleCall) or not _continues(before, after):
            break
        carried = _carried(before, after)
        if not carried or (pattern is not None and carried != pattern) or not _starts_alike(first, carried):
            break
        pattern, stop = carried, stop + 1
    return stop


def _continues(before: ModuleCall, after: ModuleCall) -> bool:
    """Whether two calls run modules of one class that follow each other in one container."""
    (container, _, name), (other, _, next_name) = before.fqn.rpartition("."), after.fqn.rpartition(".")
    if before.arguments is not None or after.arguments is not None:
        return False
    counted = is_number(name) and is_number(next_name) and int(next_name) == int(name) + 1
    same = before.model_class == after.model_class and len(before.reads) == len(after.reads)
    return counted and container == other and same and len(before.makes) == len(after.makes)


def _carried(before: ModuleCall, after: ModuleCall) -> tuple[tuple[int, int], ...]:
    """The positions that take an output of the call before; nothing if any other position changes."""
    carried = []
    for position, (earlier, later) in enumerate(zip(before.reads, after.reads, strict=True)):
        if later in before.makes:
            carried.append((position, before.makes.index(later)))
        elif earlier is not later:
            return ()
    return tuple(carried)


def _starts_alike(first: ModuleCall, carried: Sequence[tuple[int, int]]) -> bool:
    """Whether positions that carry one value also begin with one value, so that one variable serves them."""
    begin: dict[int, fx.Node] = {}
    return all(begin.setdefault(made, first.reads[position]) is first.reads[position] for position, made in carried)


def _private(items: Sequence[Item], start: int, stop: int, outputs: Iterable[fx.Node]) -> bool:
    """Whether nothing outside reads what the row hands on inside."""
    inner = {node for item in items[start : stop - 1] for node in item.makes}
    outside = [node for item in (*items[:start], *items[stop:]) for node in item.reads]
    skipped = [
        node
        for before, after in zip(items[start:stop], items[start + 2 : stop], strict=False)
        for node in before.makes
        if node in after.reads
    ]
    return not skipped and inner.isdisjoint(outside) and inner.isdisjoint(outputs)
