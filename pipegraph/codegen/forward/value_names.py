"""Names for the values of a ``forward``: those of the model's source, if it has some."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

from torch import fx

from pipegraph.codegen.forward.items import (
    ClassContents,
    FunctionStep,
    Item,
    ModeBranch,
    ModuleCall,
    ModuleLoop,
    Operation,
    StatementLoop,
    fqn_of,
    with_inner,
)
from pipegraph.codegen.names.source_statements import SourceStatement, SourceStatements, named_by_caller
from pipegraph.graph.captured import by_mode
from pipegraph.graph.custom_functions import applied_function
from pipegraph.graph.operators import operator_of
from pipegraph.torch_private.operators import OpOverload, operator_name


class ValueNames:
    """Names for the values of one class.

    Args:
        contents: the class.
        source: the statements of the model's source.
        hints: the names of values that the class returns.
        parameters: the names of the parameters of ``forward``.
        clashes: names to avoid: their values get the name of the parameter under which a module takes them, if there
            is one.
    """

    def __init__(
        self,
        contents: ClassContents,
        source: SourceStatements,
        hints: Mapping[fx.Node, str],
        parameters: Mapping[fx.Node, str],
        clashes: Container[str] = (),
    ) -> None:
        self._clashes = clashes
        self._source = source
        self._hints = hints
        self._parameters = parameters
        items = list(with_inner(contents.items))
        self._makers = {node: item for item in items for node in item.makes}
        self._chain = {item: self._find_chain(item) for item in items}
        self._assigned = self._assigned_names(items)

    def name_of(self, item: Item, node: fx.Node) -> str:
        """The name of a value that ``item`` makes."""
        name = (
            self._hints.get(node)
            or (isinstance(item, FunctionStep) and self._source.name_of_result(item.run, node))
            or self._assigned.get(node)
            or self._inner_name(item, node)
            or self._helper_name(node, innermost=True)
            or self._name_before_reshaping(node)
            or self._helper_name(node)
            or self._name_of_statement(item)
            or self._source.recorded_name(node)
            or _default_name(item)
        )
        if name not in self._clashes:
            return name
        helper_name = None if node in self._assigned else self._helper_name(node)
        return self._source.parameter_name(node, name) or helper_name or name

    def of_result(self, node: fx.Node) -> str:
        """The name of a value that is returned as an expression."""
        return self._hints.get(node) or "output"

    def is_named(self, node: fx.Node) -> bool:
        """Return whether the source has a name for a value."""
        return node in self._assigned or self._helper_name(node) is not None

    def is_nameless(self, item: Item, node: fx.Node) -> bool:
        """Return whether the source makes a value inside a larger expression."""
        has_statement = isinstance(item, Operation) or bool(self._chain.get(item))
        return node not in self._assigned and has_statement

    def is_reshaped(self, node: fx.Node) -> bool:
        """Return whether a value is only reshaped, under the same name: ``mask = mask.unsqueeze(0)``."""
        (user,) = node.users if len(node.users) == 1 else (None,)
        maker = self._makers.get(user) if user is not None and operator_of(user).keeps_values else None
        chain = self._chain.get(maker, ()) if maker is not None else ()
        return bool(chain) and chain[-1].targets == (self._assigned.get(node),)

    def statement(self, item: Item) -> SourceStatement | None:
        """The innermost statement of the source that led to an item."""
        return next(reversed(self._statements(item)), None)

    def _statements(self, item: Item) -> tuple[SourceStatement, ...]:
        """The innermost statement in a ``forward`` that led to an item, and those in the functions that it calls."""
        helpers = self._source.of_helpers(item.node) if isinstance(item, Operation) else ()
        return (*self._chain.get(item, ())[-1:], *helpers)

    def _find_chain(self, item: Item) -> tuple[SourceStatement, ...]:
        """The statements of ``forward`` methods that led to an item, outermost first."""
        if isinstance(item, Operation):
            return self._source.of_operation(item.node)
        if isinstance(item, (ModeBranch, StatementLoop)):
            return ()
        if isinstance(item, FunctionStep):
            return self._source.of_operation(item.nodes[-1])
        call = item.calls[-1] if isinstance(item, ModuleLoop) else item
        return self._source.of_call(call.fqn, call.nodes[-1])

    # ---- names in the source -----------------------------------------------------------------------------------------

    def _assigned_names(self, items: Sequence[Item]) -> dict[fx.Node, str]:
        """The results of the statements of ``forward`` → the names that the statements assign."""
        readers: dict[fx.Node, list[Item]] = {}
        for item in items:
            for node in dict.fromkeys(item.reads):
                readers.setdefault(node, []).append(item)
        results: dict[tuple[SourceStatement, int], list[fx.Node]] = {}
        iteration = loop_iterations(self._chain)
        for item, chain in self._chain.items():
            for node in item.makes if chain else ():
                if isinstance(item, Operation) and isinstance(node.meta.get("val"), (tuple, list)):
                    continue
                inside = [reader for reader in readers.get(node, ()) if chain[-1] in self._chain[reader]]
                crosses_iteration = (iteration[reader] != iteration[item] for reader in inside)
                if all(crosses_iteration) and all(self._chain[reader][-1] is chain[-1] for reader in inside):
                    results.setdefault((chain[-1], iteration[item]), []).append(node)
        names: dict[fx.Node, str] = {}
        for (statement, _), nodes in results.items():
            targets, makers = statement.targets, [self._makers[node] for node in nodes]
            if len(targets) == 1 and len(set(makers)) == len(nodes):
                names |= dict.fromkeys(nodes, named_by_caller(self._chain[makers[0]]) or targets[0])
            elif len(targets) == len(nodes) and all(isinstance(maker, Operation) for maker in makers):
                names |= dict(zip(nodes, targets, strict=True))
            elif len(targets) > 1:
                for node, maker in zip(nodes, makers, strict=True):
                    name = self._unpacked_name(maker, node)
                    names |= {node: name} if name is not None else {}
        return names

    def _unpacked_name(self, maker: Item, node: fx.Node) -> str | None:
        """The name that the caller of a module or of a function gives to one of several values that it returns."""
        if isinstance(maker, FunctionStep):
            return self._source.name_of_result(maker.run, node)
        return self._source.unpacked_name(maker.fqn, node) if isinstance(maker, ModuleCall) else None

    def _inner_name(self, item: Item, node: fx.Node) -> str | None:
        """The name of a value in the source of the module that returns it, if that returns several values."""
        outside = self._chain.get(item, ())
        several = len(item.makes) > 1 or (outside and len(outside[-1].targets) > 1)
        return self._source.own_name(node) if several and isinstance(item, (ModuleCall, ModuleLoop)) else None

    def _helper_name(self, node: fx.Node, innermost: bool = False) -> str | None:
        """The name of a value in a function that ``forward`` calls. If the function returns it, its caller names it.

        Args:
            innermost: look at the innermost function only.
        """
        for statement in self._source.of_helpers(node)[::-1][: 1 if innermost else None]:
            if any(self._is_within(user, statement) for user in node.users):
                return None
            if statement.targets:
                return statement.target_of(node) or self._name_in_tuple(node, statement)
        return None

    def _name_in_tuple(self, node: fx.Node, statement: SourceStatement) -> str | None:
        """The name of a result of ``x1, x2 = x[::2], x[1::2]``; the statement may run several times."""
        nodes = [value for value in self._makers if self._source.of_helpers(value)[-1:] == (statement,)]
        results = [value for value in nodes if not any(self._is_within(user, statement) for user in value.users)]
        targets = statement.targets
        is_complete = node in results and len(results) % len(targets) == 0
        return targets[results.index(node) % len(targets)] if is_complete else None

    def _is_within(self, node: fx.Node, statement: SourceStatement) -> bool:
        return node.op == "call_function" and self._source.is_within(node, statement)

    def _name_before_reshaping(self, node: fx.Node) -> str | None:
        """The name of the value of which this one is a reshape: ``cos = cos.unsqueeze(1)``."""
        while operator_of(node).keeps_values and isinstance(node.args[0], fx.Node):
            node = node.args[0]
            name = self._assigned.get(node) or self._hints.get(node) or self._parameters.get(node)
            if name is None and node.op == "get_attr":
                name = str(node.target).rpartition(".")[2]
            if name:
                return name
        return None

    def _name_of_statement(self, item: Item) -> str | None:
        """The name that the statement around an item assigns. An item that reads no values gets none."""
        if not item.reads:
            return None
        return next(
            (statement.targets[0] for statement in reversed(self._statements(item)) if len(statement.targets) == 1),
            None,
        )


def _default_name(item: Item) -> str:
    """The name of the operator or of the module, for a value that has none in the source."""
    if isinstance(item, Operation):
        if not isinstance(item.node.target, OpOverload):
            return "result" if item.node.target is by_mode else "part"
        if applied_function(item.node.target) is not None:
            return "result"
        name, _ = operator_name(item.node.target)
        return "attention" if name == "scaled_dot_product_attention" else name.strip("_")
    parts = [part for part in (fqn_of(item) or "").split(".") if not part.isdigit()]
    return parts[-1] if parts else "x"


StatementChain = tuple[SourceStatement, ...]


def loop_iterations(chains: Mapping[Item, StatementChain]) -> dict[Item, int]:
    """The iteration of the model's loop, counted from 0, in which each item ran; 0 outside loops.

    A statement starts its next iteration if another statement of the same ``forward`` ran in between, if it calls the
    same module again, or if it calls another module of the same list: ``for layer in self.layers: x = x + layer(x)``.

    Args:
        chains: the items in order, each with the statements that led to it, outermost first.
    """
    iteration_of: dict[Item, int] = {}
    runs: dict[SourceStatement, list[list[Item]]] = {}  # the items of each statement, in uninterrupted groups
    latest: dict[StatementChain, SourceStatement] = {}
    for item, chain in chains.items():
        iteration_of[item] = 0
        if chain:
            is_new = latest.get(chain[:-1]) is not chain[-1]
            latest[chain[:-1]] = chain[-1]
            if chain[-1].in_loop:
                groups = runs.setdefault(chain[-1], [])
                groups.extend([[]] if is_new else [])
                groups[-1].append(item)
    for statement, groups in runs.items():
        iterations = [iteration for group in groups for iteration in _split(group, statement.calls)]
        for number, iteration in enumerate(iterations):
            iteration_of |= dict.fromkeys(iteration, number)
    return iteration_of


def _split(group: Sequence[Item], called: AbstractSet[str]) -> list[Sequence[Item]]:
    """Split a group of items of one statement into iterations. Each calls the same module, or the next one of a list.

    Args:
        called: the attributes that the statement calls. It reaches any other module through a variable of the loop.
    """
    calls = [
        (position, fqn.rpartition(".")) for position, item in enumerate(group) if (fqn := fqn_of(item)) is not None
    ]
    if not calls:
        return [group]
    offset, (container, _, first) = calls[0]
    visited = {first}
    starts = [0]
    for position, (other_container, _, name) in calls[1:]:
        next_of_list = other_container == container and not {first, name} & called and name not in visited
        if next_of_list or (other_container, name) == (container, first):
            visited.add(name)
            starts.append(position - offset)
    return [group[start:stop] for start, stop in pairwise((*starts, len(group)))]
