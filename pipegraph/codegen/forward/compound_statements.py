"""Write the statements that hold others: ``if self.training: …`` and ``for layer in self.layers: …``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from torch import fx

from pipegraph.codegen.expressions.module_tree import ModuleTree
from pipegraph.codegen.expressions.operator_call import TRAINING
from pipegraph.codegen.forward.items import ClassContents, Item, ModeBranch, ModuleLoop, Operation, operands
from pipegraph.codegen.forward.local_variables import Contexts, LocalVariables
from pipegraph.codegen.forward.roll_loops import loop_statement
from pipegraph.codegen.names.identifiers import relative, unused, variable
from pipegraph.codegen.syntax.expressions import Collection, Expression, Name
from pipegraph.codegen.syntax.statements import Assign, Case, Statement


class BranchWriter:
    """Writes the branches of one ``forward``.

    Args:
        values: the variables of the ``forward``.
        name: returns the name of a value that an item makes.
        write_item: writes an item.

    Attributes:
        around: the side of a branch that is being written.
        joined: the values that are made there and read after the branch → their names.
    """

    def __init__(
        self, values: LocalVariables, name: Callable[[Item, fx.Node], str], write_item: Callable[[Item], None]
    ) -> None:
        self._values = values
        self._name = name
        self._write_item = write_item
        self.around: Contexts = ()
        self.joined: dict[fx.Node, str] = {}

    def write(self, item: ModeBranch) -> None:
        """``if self.training: h = h.tanh()``."""
        values = self._values
        values.write_all(except_for=())
        sides = ((True, item.training), (False, item.evaluation))
        mentions = [
            Counter(node for each in items for node in operands(each))
            + Counter(operands(join)[side] for join in item.joins)
            for side, (_, items) in enumerate(sides)
        ]
        for counts in mentions:
            values.uses_left.subtract(counts)
        names: list[str] = []  # a name may be that of a value that is not read after the branch
        for join in item.joins:
            wanted = self._replaced_variable(join) or variable(self._name(join, join.node), "x")
            names.append(unused(wanted, values.taken().union(names)))
        variables = dict(values.variables)
        for side, (training, items) in enumerate(sides):
            values.uses_left.update(mentions[side])
            values.variables.clear()
            values.variables.update(variables)
            self.around = (Case(TRAINING, training, item.number),)
            self.joined = {operands(join)[side]: name for join, name in zip(item.joins, names, strict=True)}
            for each in items:
                self._write_item(each)
            self._assign_joined([operands(join)[side] for join in item.joins], names)
            self.around, self.joined = (), {}
        values.variables.clear()
        values.variables.update(variables)
        for join, name in zip(item.joins, names, strict=True):
            values.variables[name] = join.node
            values.written[join.node] = Name(name)

    def _assign_joined(self, joined: Sequence[fx.Node], names: Sequence[str]) -> None:
        """Assign the values that are read after a branch to the names that they have there."""
        values = self._values
        values.write_all(except_for=joined)
        pairs = [(Name(name), values.expression(node)) for node, name in zip(joined, names, strict=True)]
        values.consume(joined)
        pairs = [(name, value) for name, value in pairs if name.text != value.text]
        overwritten = any(
            target.text in value.names() for place, (target, _) in enumerate(pairs) for _, value in pairs[place + 1 :]
        )
        if overwritten:
            targets, assigned = zip(*pairs, strict=True)
            values.statements.append((self.around, Assign(targets, Collection(assigned, "()"))))
        else:
            values.statements += [(self.around, Assign((target,), value)) for target, value in pairs]

    def _replaced_variable(self, join: Operation) -> str | None:
        """The variable that a branch changes: it holds the value of one mode, and nothing reads that afterwards."""
        values = self._values
        for node in operands(join):
            name = values.written[node].text if node in values.written else None
            if name in values.variables and values.uses_left[node] == 0:
                return name
        return None


class LoopWriter:
    """Writes the loops of one ``forward``.

    Args:
        values: the variables of the ``forward``.
        contents, tree: the class and its modules.
        name: returns the name of a value that an item makes.
        emit: adds a statement that an item leads to.
    """

    def __init__(
        self,
        values: LocalVariables,
        contents: ClassContents,
        tree: ModuleTree,
        name: Callable[[Item, fx.Node], str],
        emit: Callable[[Item, Statement], None],
    ) -> None:
        self._values = values
        self._contents = contents
        self._tree = tree
        self._name = name
        self._emit = emit

    def write(self, item: ModuleLoop) -> None:
        """``for layer in self.layers.values(): h = layer(h, cos, sin)``."""
        values = self._values
        container = relative(item.calls[0].fqn, self._contents.prefix).split(".")[:-1]
        carried = dict(item.carried)
        begin = {made: item.reads[position] for position, made in item.carried}
        for position, node in enumerate(item.reads):
            if position not in carried:
                values.write(node)
        # Names are chosen before the values that every iteration reads are consumed, so that they stay in use.
        names: dict[int, str] = {}
        for made, node in sorted(begin.items()):
            names[made] = self._carry(item, made, node, set(names.values()))
        taken = values.taken() | set(names.values())
        module = unused(variable(container[-1].removesuffix("s") if container else "module", "module"), taken)
        number = unused("i", taken)
        for made, node in enumerate(item.makes):
            if made in names:
                values.variables[names[made]] = node
                values.written[node] = Name(names[made])
            else:
                names[made] = values.bind(node, self._name(item, node))
        targets = tuple(Name(names[made]) for made in range(len(item.makes)))
        arguments = [
            [Name(names[made]) if made is not None else values.expression(node) for node, made in pattern]
            for pattern in item.patterns
        ]
        values.consume(node for pattern in item.patterns for node, made in pattern if made is None)

        classes = [each.constructor.function.text for each in item.calls]

        def iteration(called: Expression, values: Sequence[Expression]) -> Statement:
            like = next(each for each in item.calls if len(each.reads) == len(values))
            return Assign(targets, like.invocation(called, values, classes))

        self._emit(item, loop_statement(item, self._tree, container, (module, number), iteration, arguments))

    def _carry(self, item: ModuleLoop, made: int, begin: fx.Node, others: AbstractSet[str]) -> str:
        """Choose the variable that each iteration assigns, and assign ``begin`` to it before the loop if necessary.

        Args:
            made: the position of the result that each iteration assigns to it.
            begin: the value that the first iteration reads.
            others: the variables of other results.
        """
        values = self._values
        wanted = variable(self._name(item, item.makes[made]), "x")
        deferred = values.deferred.pop(begin, None)
        values.uses_left[begin] -= sum(result == made for _, result in item.carried)
        if deferred is not None:
            name = unused(wanted, values.taken() | others)
            values.statements.append((deferred.contexts, Assign((Name(name),), deferred.expression)))
        else:
            current = values.written[begin].text
            is_free = values.uses_left[begin] == 0 and current in values.variables
            if is_free and (current.startswith(wanted) or begin in self._contents.inputs):
                return current
            name = unused(wanted, values.taken() | {current, *others})
            self._emit(item, Assign((Name(name),), values.written[begin]))
        values.variables[name] = begin
        return name
