"""Roll consecutive calls of modules of one class into loops, even if their arguments alternate, and write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

from torch import fx, nn

from pipegraph.codegen.expressions.module_tree import ModuleTree
from pipegraph.codegen.forward.items import AlternateCall, ClassContents, Item, ModuleCall, ModuleLoop
from pipegraph.codegen.forward.local_variables import LocalVariables
from pipegraph.codegen.forward.statement_loops import lines_of, loops_around
from pipegraph.codegen.names.identifiers import is_number, relative, unused, variable
from pipegraph.codegen.names.source_statements import SourceStatements
from pipegraph.codegen.syntax.expressions import Expression, Name, Slice, Subscript, call, conditional, literal, method
from pipegraph.codegen.syntax.loop_index import periodic_test
from pipegraph.codegen.syntax.statements import Assign, For, If, Statement

# A loop whose iterations differ must have at least this many of them, so that it is shorter than its calls: four if one
# argument alternates (two lines), six if whole calls do (four lines).
_ITERATIONS, _ITERATIONS_OF_CALLS = 4, 6
# A loop over modules of several classes must have at least this many, unless it is the call of an nn.Sequential.
_CALLS_OF_CLASSES = 3

# The argument of a call at each position: the number of a result of the call before, or a value.
_Pattern = tuple[int | fx.Node, ...]
_Arguments = Sequence[Expression]


def roll_loops(items: Sequence[Item], outputs: Iterable[fx.Node], tree: ModuleTree, prefix: str) -> tuple[Item, ...]:
    """Replace consecutive calls by loops, each as long as possible, from the first item on.

    Args:
        items: the items of a ``forward``.
        outputs: the values that it returns.
        tree: the modules of its class, whose name in the model is ``prefix``.
    """
    rolled: list[Item] = []
    position = 0
    while position < len(items):
        loop = _longest_loop(items, position, outputs, tree, prefix)
        rolled.append(loop or items[position])
        position += len(loop.calls) if loop is not None else 1
    return tuple(rolled)


def _longest_loop(
    items: Sequence[Item], start: int, outputs: Iterable[fx.Node], tree: ModuleTree, prefix: str
) -> ModuleLoop | None:
    """The longest loop that begins at ``start``: its calls have the same arguments, or one of two sets of them."""
    calls: list[ModuleCall] = []
    for item in items[start:]:
        if not isinstance(item, ModuleCall) or (calls and not _follows(calls[-1], item)):
            break
        calls.append(item)
    patterns = [_pattern(*pair) for pair in pairwise(calls)]
    # Carried positions of the first call have no call before. It may begin every pattern whose other values it takes.
    firsts = [pattern for pattern in dict.fromkeys(patterns) if _can_begin(calls[0], pattern)]
    for count in range(len(calls), 1, -1):
        is_short = count < _CALLS_OF_CLASSES and len({call.model_class for call in calls[:count]}) > 1
        for first in firsts:
            alternate = _alternate(calls[:count], [first, *patterns][:count])
            is_loop = alternate is not None or set(patterns[: count - 1]) == {first}
            if is_loop and _is_private(items, start, start + count, outputs):
                loop = ModuleLoop(tuple(calls[:count]), _carried(first), alternate)
                if not is_short or _is_sequence(loop, tree.at(_container(loop, prefix))):
                    return loop
    return None


def _container(loop: ModuleLoop, prefix: str) -> list[str]:
    """The path of the module that holds those of the loop."""
    return relative(loop.calls[0].fqn, prefix).split(".")[:-1]


def _follows(call: ModuleCall, next_call: ModuleCall) -> bool:
    """Return whether two calls run neighbouring modules of one container: of one class, or one after the other."""
    (container, _, name), (next_container, _, next_name) = call.fqn.rpartition("."), next_call.fqn.rpartition(".")
    if call.arguments != next_call.arguments or (call.arguments is not None and call.arguments.unpacked is not None):
        return False
    counted = is_number(name) and is_number(next_name) and int(next_name) == int(name) + 1
    chained = len(call.reads) == len(next_call.reads) == 1 and call.makes == next_call.reads
    is_same_class = call.model_class == next_call.model_class and len(call.makes) == len(next_call.makes)
    return counted and container == next_container and (is_same_class or (chained and len(next_call.makes) == 1))


def _pattern(call: ModuleCall, next_call: ModuleCall) -> _Pattern:
    return tuple(call.makes.index(node) if node in call.makes else node for node in next_call.reads)


def _carried(pattern: _Pattern) -> tuple[tuple[int, int], ...]:
    """(Position, result) for each position that takes a result of the call before."""
    return tuple((position, result) for position, result in enumerate(pattern) if isinstance(result, int))


def _can_begin(first: ModuleCall, pattern: _Pattern) -> bool:
    """Return whether a first call can begin a loop of calls with a pattern: it takes the same values.

    Positions that carry the same result must begin with the same value, because one variable holds both.
    """
    if len(pattern) != len(first.reads):
        return False
    begin: dict[int, fx.Node] = {}
    matches = (
        begin.setdefault(argument, node) is node if isinstance(argument, int) else argument is node
        for argument, node in zip(pattern, first.reads, strict=True)
    )
    return all(matches) and bool(begin)


def _alternate(calls: Sequence[ModuleCall], patterns: Sequence[_Pattern]) -> AlternateCall | None:
    """The calls that are not like the first one, if there are two patterns and one of them comes periodically."""
    changes = sum(pattern != next_pattern for pattern, next_pattern in pairwise(patterns))
    numbers = [int(call.fqn.rpartition(".")[2]) for call in calls]
    separation = periodic_test(numbers, patterns) if changes > 1 else None
    if separation is None:
        return None
    test, chosen = separation
    first, position = patterns[0], next(place for place, pattern in enumerate(patterns) if pattern != patterns[0])
    other_pattern = patterns[position]
    if {result for _, result in _carried(first)} != {result for _, result in _carried(other_pattern)}:
        return None
    if len(calls) < (_ITERATIONS if _differ_in_one(first, other_pattern) else _ITERATIONS_OF_CALLS):
        return None
    return AlternateCall(test, chosen == first, calls[position].reads, _carried(other_pattern))


def _is_private(items: Sequence[Item], start: int, stop: int, outputs: Iterable[fx.Node]) -> bool:
    """Return whether only the next call reads the results of each call of ``items[start:stop]`` but the last."""
    inner = {node for item in items[start : stop - 1] for node in item.makes}
    outside = [node for item in (*items[:start], *items[stop:]) for node in item.reads]
    pairs = zip(items[start:stop], items[start + 2 : stop], strict=False)
    skipped = any(node in later_item.reads for item, later_item in pairs for node in item.makes)
    return not skipped and inner.isdisjoint(outside) and inner.isdisjoint(outputs)


def loop_statement(
    loop: ModuleLoop,
    tree: ModuleTree,
    container: Sequence[str],
    names: tuple[str, str],
    iteration: Callable[[Expression, _Arguments], Statement],
    arguments: Sequence[_Arguments],
) -> For:
    """``for layer in self.layers: …``.

    Args:
        loop: the calls.
        tree: the modules of the class.
        container: the path of the module that holds those of the loop.
        names: the variables for a module and its number.
        iteration: returns the statement that calls a module with the given arguments.
        arguments: the arguments of a call like the first one, then those of an alternate call.
    """
    module, number = map(Name, names)
    holder, owner = tree.at(container), tree.access(container)
    assert isinstance(holder, ModuleTree)
    numbers = [called.fqn.rpartition(".")[2] for called in loop.calls]
    first, last = int(numbers[0]), int(numbers[-1])
    is_complete, counted = list(holder.children) == numbers, loop.alternate is not None
    variables: tuple[Name, ...] = (number,)
    iterable: Expression = call("range", *([literal(first)] if first else []), literal(last + 1))
    called: Expression = module
    if holder.is_indexed and counted and is_complete:
        variables, iterable = (number, module), call("enumerate", owner)
    elif holder.is_indexed and counted:
        called = Subscript(owner, (number,))
    elif holder.is_indexed:
        stop = None if numbers[-1] == list(holder.children)[-1] else literal(last + 1)
        bounds = Slice(literal(first) if first else None, stop)
        variables, iterable = (module,), owner if is_complete else Subscript(owner, (bounds,))
    elif is_complete and not counted:
        variables, iterable = (module,), method(owner, "values" if holder.container is nn.ModuleDict else "children")
    elif holder.container is nn.ModuleDict:
        called = Subscript(owner, (call("str", number),))
    else:
        called = call("getattr", owner, call("str", number))
    body = _iteration(loop.alternate, number, lambda values: iteration(called, values), arguments)
    return For(tuple(variable.name for variable in variables), iterable, (body,))


def _is_sequence(loop: ModuleLoop, holder: object) -> bool:
    """Return whether a loop does what the ``nn.Sequential`` does that holds its modules."""
    is_chain = loop.alternate is None and loop.carried == ((0, 0),) and len(loop.reads) == len(loop.makes) == 1
    numbers = [call.fqn.rpartition(".")[2] for call in loop.calls]
    is_whole = isinstance(holder, ModuleTree) and holder.container is nn.Sequential and list(holder.children) == numbers
    return is_chain and is_whole and all(call.arguments is None for call in loop.calls)


def _iteration(
    alternate: AlternateCall | None,
    number: Name,
    statement: Callable[[_Arguments], Statement],
    arguments: Sequence[_Arguments],
) -> Statement:
    """One statement if the calls differ in one argument, ``x = layer(x, a if i % 2 else b)``; else an ``if``."""
    if alternate is None:
        return statement(arguments[0])
    test = alternate.test.expression(number)
    first, second = arguments if alternate.holds_first else reversed(arguments)
    if _differ_in_one(first, second):
        pairs = zip(first, second, strict=True)
        return statement([one if one == two else conditional(one, test, two) for one, two in pairs])
    return If(test, (statement(first),), (statement(second),))


def _differ_in_one(first: Sequence[object], second: Sequence[object]) -> bool:
    """Return whether two calls have the same arguments except for one."""
    return len(first) == len(second) and sum(one != two for one, two in zip(first, second, strict=True)) == 1


class LoopWriter:
    """Writes the loops of one ``forward``.

    Args:
        values: the variables of the ``forward``.
        contents, tree: the class and its modules.
        source: the lines of the model's source; None without any.
        name: returns the name of a value that an item makes.
        emit: adds a statement that an item leads to.
    """

    def __init__(
        self,
        values: LocalVariables,
        contents: ClassContents,
        tree: ModuleTree,
        source: SourceStatements | None,
        name: Callable[[Item, fx.Node], str],
        emit: Callable[[Item, Statement], None],
    ) -> None:
        self._values = values
        self._contents = contents
        self._tree = tree
        self._source = source
        self._name = name
        self._emit = emit

    def write(self, item: ModuleLoop) -> None:
        """``for layer in self.layers.values(): h = layer(h, cos, sin)``."""
        values = self._values
        container = _container(item, self._contents.prefix)
        carried = dict(item.carried)
        begin = {result: item.reads[position] for position, result in item.carried}
        for position, node in enumerate(item.reads):
            if position not in carried:
                values.write(node)
        # Names are chosen before the values that every iteration reads are consumed, so that they stay in use.
        names: dict[int, str] = {}
        for index, node in sorted(begin.items()):
            names[index] = self._carry(item, index, node, set(names.values()))
        used_names = values.used_names() | set(names.values())
        module = unused(variable(self._element(item, container), "module"), used_names)
        number = unused("i", used_names)
        for index, node in enumerate(item.makes):
            if index in names:
                values.variables[names[index]] = node
                values.written[node] = Name(names[index])
            else:
                names[index] = values.bind(node, self._name(item, node))
        targets = tuple(Name(names[result]) for result in range(len(item.makes)))
        arguments = [
            [Name(names[result]) if result is not None else values.expression(node) for node, result in pattern]
            for pattern in item.patterns
        ]
        values.consume(node for pattern in item.patterns for node, result in pattern if result is None)

        if _is_sequence(item, self._tree.at(container)):
            self._emit(item, Assign(targets, call(self._tree.access(container), *arguments[0])))
            return
        classes = [module_call.constructor.function.text for module_call in item.calls]

        def iteration(called: Expression, values: Sequence[Expression]) -> Statement:
            like = next(module_call for module_call in item.calls if len(module_call.reads) == len(values))
            return Assign(targets, like.invocation(called, like.in_order(values), classes))

        self._emit(item, loop_statement(item, self._tree, container, (module, number), iteration, arguments))

    def _element(self, item: ModuleLoop, container: Sequence[str]) -> str:
        """The name that the source has for the module of an iteration; without one, that of the container."""
        lines = () if self._source is None else lines_of(item.calls[0], self._source, self._contents.prefix)
        elements = [loop.element for _, loop in loops_around(lines) if loop.element]
        return elements[-1] if elements else container[-1].removesuffix("s") if container else "module"

    def _carry(self, item: ModuleLoop, index: int, begin: fx.Node, other_names: AbstractSet[str]) -> str:
        """Choose the variable that each iteration assigns, and assign ``begin`` to it before the loop if necessary.

        Args:
            index: the position of the result that each iteration assigns to it.
            begin: the value that the first iteration reads.
            other_names: the variables of other results.
        """
        values = self._values
        base_name = variable(self._name(item, item.makes[index]), "x")
        deferred = values.deferred.pop(begin, None)
        values.uses_left[begin] -= sum(result == index for _, result in item.carried)
        if deferred is not None:
            name = unused(base_name, values.used_names() | other_names)
            values.statements.append((deferred.contexts, Assign((Name(name),), deferred.expression)))
        else:
            current = values.written[begin].text
            is_free = values.uses_left[begin] == 0 and current in values.variables
            if is_free and (current.startswith(base_name) or begin in self._contents.inputs):
                values.write_readers(current)  # before the loop assigns another value to it
                return current
            name = unused(base_name, values.used_names() | {current, *other_names})
            self._emit(item, Assign((Name(name),), values.written[begin]))
        values.variables[name] = begin
        return name
