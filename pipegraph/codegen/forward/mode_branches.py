"""Branches by mode: group the steps of each, and write ``if self.training: … else: …``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from torch import fx

from pipegraph.codegen.expressions.operator_call import TRAINING
from pipegraph.codegen.forward.items import Item, ModeBranch, Operation, Step, operands
from pipegraph.codegen.forward.local_variables import Contexts, LocalVariables
from pipegraph.codegen.names.identifiers import unused, variable
from pipegraph.codegen.syntax.expressions import Name
from pipegraph.codegen.syntax.statements import Case
from pipegraph.graph.captured import BRANCH


def group_branches(items: Iterable[Step]) -> list[Item]:
    """Put the items of each branch into one item, unless the branch is around all of them."""
    items = list(items)
    parts = {node.meta.get(BRANCH) for item in items for node in item.nodes}
    if len(parts) == 1:
        return list(items)
    grouped: list[Item] = []
    for number, group in groupby(items, key=_branch_of):
        if number is None:
            grouped += group
            continue
        sides: dict[bool | None, list[Step]] = {True: [], False: [], None: []}
        for item in group:
            sides[item.nodes[0].meta[BRANCH].training].append(item)
        phis = tuple(item for item in sides[None] if isinstance(item, Operation))
        grouped.append(ModeBranch(number, tuple(sides[True]), tuple(sides[False]), phis))
    return grouped


def _branch_of(item: Step) -> int | None:
    """The branch that an item is part of; None for one that only contains a branch."""
    parts = {node.meta.get(BRANCH) for node in item.nodes}
    (part,) = parts if len(parts) == 1 else (None,)
    return part.number if part is not None else None


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
            Counter(node for branch_step in items for node in operands(branch_step))
            + Counter(operands(phi)[side] for phi in item.phis)
            for side, (_, items) in enumerate(sides)
        ]
        for counts in mentions:
            values.uses_left.subtract(counts)
        names: list[str] = []  # a name may be that of a value that is not read after the branch
        for phi in item.phis:
            base_name = self._replaced_variable(phi) or variable(self._name(phi, phi.node), "x")
            names.append(unused(base_name, values.used_names().union(names)))
        variables = dict(values.variables)
        for side, (training, items) in enumerate(sides):
            values.uses_left.update(mentions[side])
            values.variables.clear()
            values.variables.update(variables)
            self.around = (Case(TRAINING, training, item.number),)
            self.joined = {operands(phi)[side]: name for phi, name in zip(item.phis, names, strict=True)}
            for step in items:
                self._write_item(step)
            self._assign_joined([operands(phi)[side] for phi in item.phis], names)
            self.around, self.joined = (), {}
        values.variables.clear()
        values.variables.update(variables)
        for phi, name in zip(item.phis, names, strict=True):
            values.variables[name] = phi.node
            values.written[phi.node] = Name(name)

    def _assign_joined(self, joined: Sequence[fx.Node], names: Sequence[str]) -> None:
        """Assign the values that are read after a branch to the names that they have there."""
        values = self._values
        values.write_all(except_for=joined)
        pairs = [(Name(name), values.expression(node)) for node, name in zip(joined, names, strict=True)]
        values.consume(joined)
        values.assign(pairs, self.around)

    def _replaced_variable(self, phi: Operation) -> str | None:
        """The variable that a branch changes: it holds the value of one mode, and nothing reads that afterwards."""
        values = self._values
        for node in operands(phi):
            name = values.written[node].text if node in values.written else None
            if name in values.variables and values.uses_left[node] == 0:
                return name
        return None
