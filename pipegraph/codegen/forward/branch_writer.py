"""Write ``if self.training: … else: …``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import fx

from pipegraph.codegen.expressions.operator_call import TRAINING
from pipegraph.codegen.forward.items import Item, ModeBranch, Operation, operands
from pipegraph.codegen.forward.local_variables import Contexts, LocalVariables
from pipegraph.codegen.names.identifiers import unused, variable
from pipegraph.codegen.syntax.expressions import Collection, Name
from pipegraph.codegen.syntax.statements import Assign, Case


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
