"""The calls of modules in a graph: nested as the model nests them, with the values that they take and return.

``meta["argument_of"]`` and ``meta["result_of"]`` of a value's node hold call → place: which argument or result it was.
``meta["variables"]`` holds call → the variables of its ``forward`` that had the value, and ``meta["functions"]`` the
calls of functions in which the value was computed. ``export/module_calls.py``, ``export/variables.py`` and
``export/function_runs.py`` record them while a model is exported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Final, NamedTuple

from torch import fx

from pipegraph.graph.captured import CHECKPOINTED, Captured
from pipegraph.graph.nodes import path_of
from pipegraph.torch_private.export import call_name


@dataclass
class CallTree:
    """One call of a module: the operations of its ``forward`` and the calls it makes, in order.

    Attributes:
        call: its name, of which two calls of one module have each their own.
        fqn: the module; "" is the model itself.
        items: its operations and inner calls.
    """

    call: str
    fqn: str
    items: list[fx.Node | CallTree] = field(default_factory=list)

    def nodes(self) -> Iterator[fx.Node]:
        """All operations of the call, those of inner calls included, in order."""
        for item in self.items:
            if isinstance(item, CallTree):
                yield from item.nodes()
            else:
                yield item

    def descendants(self) -> Iterator[CallTree]:
        """All calls inside, however deep."""
        for call in self.calls():
            yield call
            yield from call.descendants()

    def calls(self) -> Iterator[CallTree]:
        """The calls that this one makes itself."""
        return (item for item in self.items if isinstance(item, CallTree))


def call_tree(nodes: Sequence[fx.Node]) -> CallTree:
    """Nest ``nodes`` by the module calls they ran in; of a call that ran more operations, the tree holds these."""
    root = CallTree(call="", fqn="")
    stack = [root]
    for node in nodes:
        path = path_of(node)
        depth = 0
        while depth < len(path) and depth + 1 < len(stack) and stack[depth + 1].call == path[depth][0]:
            depth += 1
        del stack[depth + 1 :]
        for call, fqn in path[depth:]:
            inner = CallTree(call=call, fqn=fqn)
            stack[-1].items.append(inner)
            stack.append(inner)
        stack[-1].items.append(node)
    return root


class StageMembers:
    """The operations, results and state of one stage."""

    def __init__(self, nodes: Iterable[fx.Node], outputs: Iterable[fx.Node], state: Iterable[str]) -> None:
        self.nodes, self.outputs, self.state = frozenset(nodes), frozenset(outputs), frozenset(state)
        self.results_read: dict[str, set[int]] = {}  # module → the places of results that any call of it is read at

    def read_outside(self, node: fx.Node, inner: AbstractSet[fx.Node]) -> bool:
        """Return whether an operation outside ``inner``, in this stage or a later one, reads a value."""
        return node in self.outputs or any(user in self.nodes and user not in inner for user in node.users)

    def learn_results(self, root: CallTree) -> None:
        """Learn which results of modules are read after their calls inside ``root``."""
        for tree in root.descendants():
            inner = set(tree.nodes())
            read = (result_place(node, tree.call) for node in inner if self.read_outside(node, inner))
            self.results_read.setdefault(tree.fqn, set()).update(place.order for place in read if place is not None)


@dataclass(frozen=True)
class CallValues:
    """A call: its operations, the values that it takes, and the values that it returns."""

    tree: CallTree
    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]


def call_values(captured: Captured, members: StageMembers, tree: CallTree, unread: bool = False) -> CallValues:
    """The values that a call takes and returns, in the order of its arguments and results as far as known.

    Args:
        unread: whether results that nothing reads are returned if those of another call of the module are read, so
            that all calls return the same.
    """
    returned = members.results_read.get(tree.fqn, set()) if unread else set()
    nodes = tuple(tree.nodes())
    inner = set(nodes)
    read = dict.fromkeys(node for operation in nodes for node in operation.all_input_nodes if node not in inner)
    names = captured.names_of
    foreign = [
        node
        for node in read
        if node.op != "get_attr" or not any(is_within(name, tree.fqn) for name in names[str(node.target)])
    ]
    results = [
        node
        for node in nodes
        if members.read_outside(node, inner)
        or ((place := result_place(node, tree.call)) is not None and place.order in returned)
    ]
    return CallValues(
        tree,
        nodes,
        sorted_by_place(foreign, (argument_place(node, tree.call) for node in foreign)),
        sorted_by_place(results, (result_place(node, tree.call) for node in results)),
    )


def is_within(name: str, prefix: str) -> bool:
    """Return whether a dotted name is inside ``prefix``; everything is inside the model, whose name is ""."""
    return not prefix or name.startswith(f"{prefix}.")


@dataclass(frozen=True)
class ArgumentPlace:
    """The place of an argument among all tensors that a call took.

    Attributes:
        order: its position among them.
        name: the parameter of ``forward``; None for a part of a tuple, which has no name.
        other_names: further parameters that took the same value: ``attention(x, x, x)``.
        other_orders: its further positions.
        part_of: of a part of a tuple, the parameter that takes the tuple, and its index there.
    """

    order: int
    name: str | None
    other_names: tuple[str, ...] = ()
    other_orders: tuple[int, ...] = ()
    part_of: tuple[str, int] | None = None

    @property
    def orders(self) -> tuple[int, ...]:
        """All positions of the value."""
        return (self.order, *self.other_orders)

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters that took the value."""
        return self.other_names if self.name is None else (self.name, *self.other_names)

    def joined(self, other_place: ArgumentPlace) -> ArgumentPlace:
        """This place, with the names and positions of another place of the same value in the same call."""
        names = (name for name in other_place.names if name not in self.names)
        orders = (order for order in other_place.orders if order not in self.orders)
        return replace(self, other_names=(*self.other_names, *names), other_orders=(*self.other_orders, *orders))


@dataclass(frozen=True)
class ResultPlace:
    """The place of a result among all tensors that a call returned.

    Attributes:
        order: its position among them.
        index: if ``forward`` returned a tuple of ``count`` values, its index there; None for a part of a part.
        count: how many values ``forward`` returned.
        arguments: the arguments of the call by parameter. Numbers, texts and None stand as they are, a tuple of ``...``
            for one of tensors, and ``...`` for all else.
        positional: how many of them were given by position.
        path: its indices in nested tuples, outermost first: (1, 0) of ``h`` in ``out, (h, c)``. None for a part of
            something else.
        form: what ``forward`` returned, with ``...`` for tensors and None for all else but tuples.
    """

    order: int
    index: int | None
    count: int
    arguments: tuple[tuple[str, object], ...] = ()
    positional: int = 0
    path: tuple[int, ...] | None = None
    form: object = None


class VariablePlace(NamedTuple):
    """A variable of a method that had a value, or had it in nested tuples.

    Attributes:
        function: the first line of the method.
        name: of the variable.
        path: the indices of the value in nested tuples; empty for the value itself.
        line: the line that assigned it; 0 for a parameter.
        order: the number of the assignment in the model.
        is_end: whether the variable had the value until that line assigned another one.
    """

    function: int
    name: str
    path: tuple[int, ...]
    line: int
    order: int
    is_end: bool = False


OBJECT: Final = "an object"
"""The form of an argument or a result that is neither a tensor nor a plain value."""


@dataclass(frozen=True)
class FunctionRun:
    """One call of a function of the model's source, or of a method of the module that runs.

    ``meta["variables"]`` has the places of the tensors that it takes and returns under `key`.

    Attributes:
        name: of the function.
        file, line: where the function begins.
        caller: the file and the line that called it.
        call: the call of the module that ran then.
        number: how many times that call had called the function before.
        is_method: whether it is a method of that module.
        arguments: the parameters, each with its form: ``...`` for a tensor, a tuple of forms, a `PlainValue`, a
            `ModuleValue`, or `OBJECT`.
        result: the form of what it returned.
        function: the function.
    """

    name: str
    file: str
    line: int
    caller: tuple[str, int]
    call: str
    number: int
    is_method: bool
    arguments: tuple[tuple[str, object], ...]
    result: object
    function: FunctionType = field(compare=False, repr=False)

    @property
    def key(self) -> str:
        """What stands for a call of a module in ``meta["variables"]``."""
        return function_key(self.call, self.file, self.line, self.number)


@dataclass(frozen=True)
class PlainValue:
    """An argument of a function that is a number, a dynamic size, a text, a dtype, a device or None."""

    value: object


@dataclass(frozen=True)
class ModuleValue:
    """An argument of a function that is a module inside of the one that runs: its name there."""

    name: str


RETURNED: Final = "return"
"""The name in a `VariablePlace` for what a function returned."""


def function_key(call: str, file: str, line: int, number: int) -> str:
    """What stands for one call of a function in ``meta["variables"]``; no call of a module has such a name."""
    return f"{call} {file}:{line} {number}"


def functions_of(node: fx.Node) -> tuple[FunctionRun, ...]:
    """The calls of functions in which a value was computed, outermost first."""
    return node.meta.get("functions", ())


def argument_place(node: fx.Node, call: str) -> ArgumentPlace | None:
    """The place of a value among the arguments of a call; None if it was no argument, or the call is unknown."""
    place: ArgumentPlace | None = node.meta.get("argument_of", {}).get(call_name(call))
    return place


def result_place(node: fx.Node, call: str) -> ResultPlace | None:
    """The place of a value in what a call returned; None if it was not returned, or the call is unknown."""
    place: ResultPlace | None = node.meta.get("result_of", {}).get(call_name(call))
    return place


def parameter_names(node: fx.Node) -> Iterator[tuple[str, str]]:
    """(FQN of the module, name of the parameter) for each call that took a value, in the order of the calls."""
    for call, place in node.meta.get("argument_of", {}).items():
        if place.name:
            yield call.partition("@")[0], place.name


def sorted_by_place(
    values: Sequence[fx.Node], places: Iterable[ArgumentPlace | ResultPlace | None]
) -> tuple[fx.Node, ...]:
    """Values in the order of their places; values without one come last, in their own order."""
    numbered_values = [
        (sys.maxsize if place is None else place.order, value) for value, place in zip(values, places, strict=True)
    ]
    return tuple(value for _, value in sorted(numbered_values, key=lambda pair: pair[0]))


def copy_places(source: fx.Node, target: fx.Node) -> None:
    """Give ``target``, which replaces or copies ``source``, the places of ``source`` as well."""
    for key in ("argument_of", "result_of", CHECKPOINTED):
        places = {**source.meta.get(key, {}), **target.meta.get(key, {})}
        for call, place in source.meta.get(key, {}).items():
            if isinstance(place, ArgumentPlace):
                places[call] = places[call].joined(place)
        if places:
            target.meta[key] = places
    variables = dict(target.meta.get("variables", {}))
    for call, names in source.meta.get("variables", {}).items():
        variables[call] = tuple(dict.fromkeys((*variables.get(call, ()), *names)))
    if variables:
        target.meta["variables"] = variables


def replace_node(node: fx.Node, value: object) -> None:
    """Let all that reads ``node`` read ``value`` instead, also in calls of modules, and erase ``node``."""
    assert isinstance(value, fx.Node)
    copy_places(node, value)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
