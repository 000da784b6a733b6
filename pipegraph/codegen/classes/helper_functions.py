"""Functions of the model's source outside its classes, such as ``rotate_half(x)``. A package has each of them once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from pipegraph.codegen.expressions.module_tree import ModuleTree
from pipegraph.codegen.expressions.operation import common_regions
from pipegraph.codegen.forms import Forms
from pipegraph.codegen.forward.items import ClassContents, HelperCall, Operation
from pipegraph.codegen.forward.source_numbers import HelperNumbers, ReplacedParameterError
from pipegraph.codegen.forward.statement_loops import roll_statements
from pipegraph.codegen.forward.tensor_attributes import UnknownAttributeError
from pipegraph.codegen.forward.write_forward import write_forward
from pipegraph.codegen.names.identifiers import class_name, variable
from pipegraph.codegen.names.model_names import ModelNames, prose
from pipegraph.codegen.names.source_statements import SourceStatements
from pipegraph.codegen.syntax.expressions import SELF
from pipegraph.codegen.syntax.statements import FunctionSource, Statement
from pipegraph.graph.calls import CallTree, CallValues, StageMembers, call_tree, call_values
from pipegraph.graph.captured import BRANCH, Captured
from pipegraph.graph.nodes import helper_function, helpers_of
from pipegraph.graph.symbolic_size import UnknownSizeError

# A call of at most this many operations reads better as these.
_SMALL = 2

_Structure = tuple[int, int, tuple[Statement, ...]]


class HelperFunctions:
    """The functions of a package. One whose calls compute different things, or are cut, is written out at each call.

    Attributes:
        sources: name → the function.
    """

    def __init__(self, captured: Captured, names: ModelNames, forms: Forms) -> None:
        self.sources: dict[str, FunctionSource] = {}
        self._captured = captured
        self._names = names
        self._source = SourceStatements(captured)
        self._operations = Counter(call for node in captured.nodes for call in helpers_of(node))
        self._structures: dict[str, _Structure] = {}
        members = StageMembers(captured.nodes, captured.returned, captured.state)
        classes = tuple({class_name(module.class_name) for module in captured.modules.values()})  # or Block2, Block3, …
        calls: dict[str, list[CallTree]] = {}
        for tree in call_tree(captured.nodes, helpers=True).descendants():
            if helper_function(tree.call):
                calls.setdefault(_written_name(tree), []).append(tree)
        names_of_functions = (name for name in calls if _may_name(name, classes) and forms.is_function(name))
        waiting = {name: calls[name] for name in names_of_functions}
        while ready := [name for name, trees in waiting.items() if waiting.keys().isdisjoint(_inside(trees))]:
            for name in ready:
                self._collect(name, waiting.pop(name), members)

    def call(self, members: StageMembers, tree: CallTree) -> HelperCall | None:
        """The call of a function; None if its operations have to be written instead."""
        name = _written_name(tree)
        if name not in self.sources:
            return None
        structure = self._structure(members, tree)
        if structure is None or structure[1] != self._structures[name]:
            return None
        called = structure[0]
        return HelperCall(name, called.reads, called.makes, called.nodes)

    def used_by(self, texts: Iterable[str]) -> tuple[FunctionSource, ...]:
        """The functions of these names and those that they call, in an order in which each can be defined."""
        used = set(texts)
        for source in reversed(self.sources.values()):
            if source.name in used:
                used |= source.uses()
        return tuple(source for source in self.sources.values() if source.name in used)

    def _collect(self, name: str, trees: list[CallTree], members: StageMembers) -> None:
        """Add a function if all its calls are alike."""
        structures = [self._structure(members, tree) for tree in trees]
        first = structures[0]
        if first is None or any(structure is None or structure[1] != first[1] for structure in structures):
            return
        called = first[0]
        parameters = self._names.parameters(called.tree, called.reads)
        try:
            statements = self._statements(members, called, parameters, named=True)
        except ReplacedParameterError:
            return
        own_name = helper_function(called.tree.call)
        place = SourceStatements(self._captured, helper=own_name).place_of_helper(called.nodes[0])
        self._structures[name] = first[1]
        self.sources[name] = FunctionSource(name, f"{own_name} ({prose(place)}).", tuple(parameters), statements)

    def _structure(self, members: StageMembers, tree: CallTree) -> tuple[CallValues, _Structure] | None:
        """What a call takes and returns, and everything in which two calls of one function must agree."""
        called = call_values(self._captured, members, tree)
        if not self._can_stand(called):
            return None
        neutral = [f"p{position}" for position in range(len(called.reads))]
        try:
            statements = self._statements(members, called, neutral, named=False)
        except (UnknownSizeError, UnknownAttributeError):  # the code around the call has the tensor
            return None
        if any(part == SELF for statement in statements for part in statement.walk()):  # a dropout asks for the mode
            return None
        return called, (len(called.reads), len(called.makes), statements)

    def _statements(
        self, members: StageMembers, called: CallValues, parameters: Sequence[str], named: bool
    ) -> tuple[Statement, ...]:
        """The body of a call's function, with the names of the model's source or with neutral ones."""
        call, first = called.tree.call, called.nodes[0]
        source = SourceStatements(self._captured, helper=helper_function(call))
        numbers = HelperNumbers(source, call, first, dict(zip(called.reads, parameters, strict=True)))
        tree = ModuleTree(is_class=True)
        contents = self._contents(members, called)
        return write_forward(contents, tree, parameters, source if named else None, numbers=numbers).statements

    def _can_stand(self, called: CallValues) -> bool:
        nodes = called.nodes
        if len(nodes) <= _SMALL or len(nodes) != self._operations[called.tree.call] or not called.makes:
            return False
        if any(BRANCH in node.meta or "writes" in node.meta for node in nodes):
            return False
        return all(isinstance(node.meta.get("val"), torch.Tensor) for node in (*called.reads, *called.makes))

    def _contents(self, members: StageMembers, called: CallValues) -> ClassContents:
        items = tuple(self._items(members, called.tree))
        return ClassContents(
            prefix=called.tree.fqn,
            items=roll_statements(items, called.makes, self._source, called.tree.fqn),
            inputs=called.reads,
            outputs=called.makes,
            state={},
            state_names={},
            outer_regions=len(common_regions(called.nodes)),
        )

    def _items(self, members: StageMembers, tree: CallTree) -> Iterator[Operation | HelperCall]:
        for child in tree.items:
            if isinstance(child, fx.Node):
                yield Operation(child)
                continue
            item = self.call(members, child)
            if item is not None:
                yield item
            else:
                yield from self._items(members, child)


def _may_name(name: str, classes: tuple[str, ...]) -> bool:
    """Return whether a function in a package can have this name without a conflict with the package's own names."""
    return variable(name, "") == name == class_name(name) and not name.startswith(classes)


def _inside(trees: Iterable[CallTree]) -> set[str]:
    """The functions that calls call in turn."""
    return {_written_name(inner) for tree in trees for inner in tree.descendants()}


def _written_name(tree: CallTree) -> str:
    """The name of a call's function in a package, where no name begins with an underscore."""
    return variable(helper_function(tree.call), "")
