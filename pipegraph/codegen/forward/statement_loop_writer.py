"""Write loops of statements: ``for t in range(x.shape[1]): h = self.cell(x[:, t], h)``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import fx

from pipegraph.codegen.forward.items import Item, ModuleCall, StatementLoop, Step, operands
from pipegraph.codegen.forward.local_variables import Lists, LocalVariables
from pipegraph.codegen.forward.loop_header import LoopHeaders
from pipegraph.codegen.names.identifiers import unused, variable
from pipegraph.codegen.syntax.expressions import (
    Collection,
    Expression,
    Name,
    Node,
    Subscript,
    literal,
    method,
)
from pipegraph.codegen.syntax.loop_index import (
    StructureMismatch,
    at_iteration,
    in_all_iterations,
)
from pipegraph.codegen.syntax.statements import Assign, Evaluate, For, nested
from pipegraph.graph.symbolic_size import SymbolicSize

Part = TypeVar("Part", bound=Node)
_Value = Callable[[fx.Node | SymbolicSize], Expression]


class UnrolledLoopError(Exception):
    """The iterations of a loop cannot be written as one.

    Attributes:
        loop: the loop.
    """

    def __init__(self, loop: StatementLoop) -> None:
        super().__init__()
        self.loop = loop


class StatementLoopWriter:
    """Writes the loops over statements of one ``forward``.

    Args:
        values: the variables of the ``forward``.
        headers: writes the first line of each.
        lists: the lists to which loops append.
        inputs: the parameters of the ``forward``.
        name: returns the name of a value that an item makes.
        write_item: writes an item.

    Attributes:
        names: the values that need a variable while a loop is written → the wanted names.
    """

    def __init__(
        self,
        values: LocalVariables,
        headers: LoopHeaders,
        lists: Lists,
        inputs: Sequence[fx.Node],
        name: Callable[[Item, fx.Node], str],
        write_item: Callable[[Item], None],
    ) -> None:
        self._values = values
        self._headers = headers
        self._lists = lists
        self._inputs = inputs
        self._name = name
        self._write_item = write_item
        self.names: dict[fx.Node, str] = {}
        self._third: dict[fx.Node, fx.Node] = {}  # the values of the second iteration → those of the third
        self._second: dict[fx.Node, fx.Node] = {}  # what the third takes → what the second takes there
        self._varying: dict[fx.Node, Expression] = {}
        self._calls: dict[ModuleCall, list[ModuleCall]] = {}

    # ---- what the loops ask of the writer of items -------------------------------------------------------------------

    def spell(self, node: fx.Node, spelled: Callable[[fx.Node, _Value], Part], value: _Value) -> Part:
        """How an operation is written; inside a loop, with progressions in place of the numbers of one iteration.

        Args:
            node: the operation.
            spelled: writes an operation, with the expressions of its operands.
            value: returns the expression of a value or of a dynamic size.
        """
        written = spelled(node, value)
        third = self._third.get(node)
        if third is None:
            return self._lists.with_lists(written)
        return in_all_iterations(written, spelled(third, lambda operand: value(self._of_second(operand))))

    def varying(self, node: fx.Node) -> Expression | None:
        """The expression of a value that each iteration has from outside, if it is another one for each."""
        return self._varying.get(node)

    def module(self, called: ModuleCall, access: Callable[[ModuleCall], Expression]) -> Expression:
        """The expression of the module of a call: ``self.experts[i]`` inside a loop."""
        return self._by_iteration([access(call) for call in self._calls.get(called, [called])])

    def classes(self, called: ModuleCall) -> list[str]:
        """The classes of the modules that a call stands for: in a loop, of all that are called in its place."""
        return [call.constructor.function.text for call in self._calls.get(called, [called])]

    def _of_second(self, operand: fx.Node | SymbolicSize) -> fx.Node | SymbolicSize:
        return self._second.get(operand, operand) if isinstance(operand, fx.Node) else operand

    def _by_iteration(self, expressions: Sequence[Expression]) -> Expression:
        if len(expressions) == 1:
            return expressions[0]
        loop_expression = in_all_iterations(expressions[1], expressions[2])
        if any(at_iteration(loop_expression, number) != expression for number, expression in enumerate(expressions)):
            raise StructureMismatch
        return loop_expression

    # ---- a loop ------------------------------------------------------------------------------------------------------

    def write(self, item: StatementLoop) -> None:
        """Write a loop.

        Raises:
            UnrolledLoopError: its iterations differ in more than numbers that grow.
        """
        try:
            self._write(item)
        except StructureMismatch as error:
            raise UnrolledLoopError(item) from error

    def _write(self, item: StatementLoop) -> None:
        values = self._values
        values.write_all(except_for=())
        read_later = self._set_later_reads_aside(item)
        reads = list(item.reads)
        carried = [self._begin(item, *entry[:3], reads) for entry in item.carried]
        lists = [
            values.keep(name, Collection((), "[]"))
            for name, _ in zip(self._list_names(item), item.collected, strict=True)
        ]
        self._enter(item)
        dead = self._forget_dead_variables()
        outer, values.statements = values.statements, []
        self.names.update(zip((carry[2] for carry in item.carried), carried, strict=True))
        for final_node, _ in item.final:
            base_name = variable(self._name(_maker(item, final_node), final_node), "x")
            self.names.setdefault(final_node, f"last_{base_name}" if base_name in carried else base_name)
        for step in item.inner:
            self._write_item(step)
            for nodes, name in zip(item.collected, lists, strict=True):
                if nodes[1] in step.makes:
                    self._append(name, nodes[1])
        self._hand_on(item, carried)
        body = nested(values.statements)
        values.statements = outer
        values.consume(reads)
        values.uses_left.update(read_later)
        values.variables.update({name: node for name, node in dead.items() if name not in values.variables})
        self._leave(item, lists, carried)
        for of_this_loop in (self.names, self._third, self._second, self._varying, self._calls):
            of_this_loop.clear()
        values.statements.append(((), self._with_tuple(item, self._headers.statement(item, body))))

    def _list_names(self, item: StatementLoop) -> list[str]:
        """The names in the source if its number of lists is the same; else the names of the elements, with an s."""
        if len(item.source.lists) == len(item.collected):
            return list(item.source.lists)
        names = (self._name(_maker(item, nodes[1]), nodes[1]) for nodes in item.collected)
        return ["results" if name.endswith("s") else f"{name}s" for name in names]

    def _begin(self, item: StatementLoop, begin: fx.Node, first: fx.Node, second: fx.Node, reads: list[fx.Node]) -> str:
        """Choose the variable of a carried value, and assign ``begin`` to it if necessary."""
        values = self._values
        base_name = variable(self._name(_maker(item, second), second), "x")
        current = values.written[begin].text
        if begin in reads:
            reads.remove(begin)
            values.uses_left[begin] -= 1
        fits = current.startswith(base_name) or begin in self._inputs
        if fits and values.variables.get(current) is begin and values.uses_left[begin] == 0:
            name = current
        else:
            name = unused(base_name, values.used_names())
            is_shared = sum(begin is initial_node for initial_node, *_ in item.carried) > 1
            if is_shared or values.uses_left[begin] > 0 or not self._renamed(current, name):
                values.statements.append(((), Assign((Name(name),), values.written[begin])))
        values.variables[name] = first
        values.written[first] = Name(name)
        return name

    def _renamed(self, name: str, new: str) -> bool:
        """Let the statement that assigns to a name assign to another one, if nothing mentions either since then."""
        statements = self._values.statements
        for position in reversed(range(len(statements))):
            around, statement = statements[position]
            if isinstance(statement, Assign) and statement.targets == (Name(name),) and not around:
                statements[position] = (), replace(statement, targets=(Name(new),))
                self._values.variables.pop(name, None)
                return True
            if any(part in (Name(name), Name(new)) for part in statement.walk()):
                return False
        return False

    def _enter(self, item: StatementLoop) -> None:
        """Note what the other iterations have in the place of what the second has."""
        for nodes in item.varying:
            self._varying[nodes[1]] = self._by_iteration([self._values.written[node] for node in nodes])
            self._second[nodes[2]] = nodes[1]
        for second_step, third_step in zip(item.iterations[1], item.iterations[2], strict=True):
            assert second_step is not None
            assert third_step is not None
            self._third.update(zip(second_step.makes, third_step.makes, strict=True))
            self._second.update(zip(third_step.makes, second_step.makes, strict=True))
        for _, first, second, _ in item.carried:
            self._second[second] = first
        for steps in zip(*item.iterations, strict=True):
            if isinstance(steps[1], ModuleCall):
                self._calls[steps[1]] = [step for step in steps if isinstance(step, ModuleCall)]

    def _set_later_reads_aside(self, item: StatementLoop) -> Counter[fx.Node]:
        """Count for the values of the first two iterations no more than what the written one reads."""
        values, inside = self._values, Counter(operands(item))
        nodes = [node for steps in item.iterations[:2] for step in steps if step is not None for node in step.makes]
        later_reads = Counter({node: values.uses_left[node] - inside[node] for node in nodes})
        values.uses_left.subtract(later_reads)
        return later_reads

    def _forget_dead_variables(self) -> dict[str, fx.Node]:
        """Take the variables that nothing reads any more from those in use: a later iteration may find another value
        there."""
        values = self._values
        dead = {name: node for name, node in values.variables.items() if values.uses_left[node] <= 0}
        for name in dead:
            del values.variables[name]
        return dead

    def _append(self, name: Name, node: fx.Node) -> None:
        """Append a result of an iteration to its list."""
        values = self._values
        if node in values.deferred and values.deferred[node].contexts:
            values.write(node)
        expression = values.expression(node)
        values.consume([node])
        values.statements.append(((), Evaluate(method(name, "append", expression))))

    def _hand_on(self, item: StatementLoop, carried: Sequence[str]) -> None:
        """Hand the values on that the next iteration takes."""
        values = self._values
        values.write_all(except_for=())
        pairs = [(Name(name), values.written[carry[2]]) for carry, name in zip(item.carried, carried, strict=True)]
        values.consume(carry[2] for carry in item.carried)
        values.assign(pairs, ())

    def _leave(self, item: StatementLoop, lists: Sequence[Name], carried: Sequence[str]) -> None:
        """Note where the values are that are read after the loop."""
        values = self._values
        for (_, _, _, last), variable_name in zip(item.carried, carried, strict=True):
            if last is not None:
                self._hold(last, Name(variable_name))
        for final_node, last in item.final:
            values.consume([final_node])
            if last not in values.written:
                self._hold(last, values.written[final_node])
        for nodes, name in zip(item.collected, lists, strict=True):
            for number, node in enumerate(nodes):
                if node is not nodes[-1] or node not in values.written:
                    values.written[node] = Subscript(name, (literal(number),))
            self._lists.add(name, nodes)

    def _with_tuple(self, item: StatementLoop, loop: For) -> For:
        """``for piece in x.chunk(4)`` instead of ``for piece in pieces``, if nothing else reads the pieces."""
        values = self._values
        read_later = any(values.uses_left[node] > 0 for nodes in item.varying for node in nodes)
        if read_later or any(part == loop.iterable for statement in loop.body for part in statement.walk()):
            return loop
        assigned: set[str] = set()  # since then
        for position in reversed(range(len(values.statements))):
            around, assignment = values.statements[position]
            if around or not isinstance(assignment, Assign):
                return loop
            if assignment.targets == (loop.iterable,) and assigned.isdisjoint(assignment.value.names()):
                del values.statements[position]
                return replace(loop, iterable=assignment.value)
            if not isinstance(assignment.value, Name) and assignment.value != Collection((), "[]"):
                return loop
            assigned.update(target.text for target in assignment.targets)
        return loop

    def _hold(self, node: fx.Node, place: Expression) -> None:
        self._values.written[node] = place
        if place.text in self._values.variables:
            self._values.variables[place.text] = node


def _maker(loop: StatementLoop, node: fx.Node) -> Step:
    """The step of the written iteration that makes a value."""
    return next(step for step in loop.inner if node in step.makes)


def expanded(items: Sequence[Item], loop: StatementLoop) -> Iterator[Item]:
    """Items with the steps of all iterations in place of a loop."""
    for item in items:
        if item is loop:
            yield from loop.steps
        else:
            yield item
