"""What the values of a ``forward`` are called: as in the model's source, wherever it says."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping

import torch
from torch import fx

from pipegraph.codegen.forward.items import ClassContents, Item, ModuleCall, ModuleLoop, Operation, fqn_of
from pipegraph.codegen.forward.loop_iterations import loop_iterations
from pipegraph.codegen.names.source_statements import SourceStatement, SourceStatements
from pipegraph.graph.operators import operator_of


class ValueNames:
    """Names for the values of one scope.

    Without ``source`` all values are called ``v``. ``wanted`` names values that the source leaves unnamed,
    ``parameters`` the arguments of the ``forward``. Of values whose name is one of ``clashes``, those that modules take
    under another name are called by that.
    """

    def __init__(
        self,
        contents: ClassContents,
        source: SourceStatements | None,
        wanted: Mapping[fx.Node, str],
        parameters: Mapping[fx.Node, str],
        clashes: Container[str] = (),
    ) -> None:
        self._clashes = clashes
        self._source = source
        self._wanted = wanted
        self._parameters = parameters
        self._makers = {node: item for item in contents.items for node in item.makes}
        self._chain = {item: self._find_chain(item) for item in contents.items} if source else {}
        self._given = self._name_results(contents)

    def of(self, item: Item, node: fx.Node) -> str:
        """The name of a value that ``item`` makes."""
        if self._source is None:
            return "v"
        name = self._in_source(item, node)
        if name not in self._clashes:
            return name
        other = None if node in self._given else self._helper_name(node)
        return self._source.parameter_name(node, name) or other or name

    def _in_source(self, item: Item, node: fx.Node) -> str:
        named = self._given.get(node) or self._wanted.get(node) or self._inner_name(item, node)
        named = named or self._helper_name(node, innermost=True) or self._name_of_content(node)
        named = named or self._helper_name(node) or self._name_of_statement(item)
        return named or _default_name(item)

    def of_result(self, node: fx.Node) -> str:
        """The name of a value that is returned as an expression."""
        return self._wanted.get(node) or "output"

    def is_named(self, node: fx.Node) -> bool:
        """Whether the source gives a value a name of its own."""
        return self._source is not None and (node in self._given or self._helper_name(node) is not None)

    def is_reshaped(self, node: fx.Node) -> bool:
        """Whether the only thing that becomes of a value is the same in another shape, under the same name:
        ``position_ids = position_ids.unsqueeze(0)``."""
        (user,) = node.users if len(node.users) == 1 else (None,)
        maker = self._makers.get(user) if user is not None and operator_of(user).keeps_values else None
        chain = self._chain.get(maker, ()) if maker is not None else ()
        return bool(chain) and chain[-1].targets == (self._given.get(node),)

    def is_nameless(self, item: Item, node: fx.Node) -> bool:
        """Whether the source makes a value inside an expression, so that it may stand inside one again."""
        known = isinstance(item, Operation) or bool(self._chain.get(item))
        return self._source is not None and node not in self._given and known

    def _name_of_content(self, node: fx.Node) -> str | None:
        """A tensor in another shape keeps its name: ``cos = cos.unsqueeze(1)``."""
        while operator_of(node).keeps_values and isinstance(node.args[0], fx.Node):
            node = node.args[0]
            name = self._given.get(node) or self._wanted.get(node) or self._parameters.get(node)
            if name is None and node.op == "get_attr":
                name = str(node.target).rpartition(".")[2]
            if name:
                return name
        return None

    def _name_of_statement(self, item: Item) -> str | None:
        """A step within a statement goes by the name of what the statement makes, if it works on values itself."""
        if not item.reads:
            return None
        return next((each.targets[0] for each in reversed(self._statements(item)) if len(each.targets) == 1), None)

    def statement(self, item: Item) -> SourceStatement | None:
        """The innermost statement of the source that an item is a part of."""
        return next(reversed(self._statements(item)), None)

    def _statements(self, item: Item) -> tuple[SourceStatement, ...]:
        """The innermost statement in a ``forward`` that led to an item, and those in the functions that it calls."""
        assert self._source is not None
        helpers = self._source.of_helpers(item.node) if isinstance(item, Operation) else ()
        return (*self._chain.get(item, ())[-1:], *helpers)

    def _inner_name(self, item: Item, node: fx.Node) -> str | None:
        """Where a call gives several values, what its own source calls each."""
        assert self._source is not None
        outside = self._chain.get(item, ())
        several = len(item.makes) > 1 or (outside and len(outside[-1].targets) > 1)
        return self._source.own_name(node) if several and not isinstance(item, Operation) else None

    def _helper_name(self, node: fx.Node, innermost: bool = False) -> str | None:
        """What a function that ``forward`` calls names the result of one of its statements; for what a function
        returns, what the function that calls it names that."""
        assert self._source is not None
        for statement in self._source.of_helpers(node)[::-1][: 1 if innermost else None]:
            targets = statement.targets
            if any(self._within(user, statement) for user in node.users):
                return None
            if node.target is operator.getitem and len(targets) == len(node.args[0].meta["val"]):  # type: ignore[union-attr]
                return targets[int(node.args[1])]  # type: ignore[arg-type]
            if targets:
                return targets[0] if len(targets) == 1 else self._name_in_row(node, statement)
        return None

    def _name_in_row(self, node: fx.Node, statement: SourceStatement) -> str | None:
        """The name of one of the operations of ``x1, x2 = x[::2], x[1::2]``, which may run several times."""
        assert self._source is not None
        made = [each for each in self._makers if self._source.of_helpers(each)[-1:] == (statement,)]
        row = [each for each in made if not any(self._within(user, statement) for user in each.users)]
        targets = statement.targets
        return targets[row.index(node) % len(targets)] if node in row and len(row) % len(targets) == 0 else None

    def _within(self, node: fx.Node, statement: SourceStatement) -> bool:
        assert self._source is not None
        return node.op == "call_function" and self._source.is_within(node, statement)

    def _name_results(self, contents: ClassContents) -> dict[fx.Node, str]:
        """The values that the model's source names: what a statement leaves for others is what it assigns."""
        maker = self._makers
        readers: dict[fx.Node, list[Item]] = {}
        for item in contents.items:
            for node in dict.fromkeys(item.reads):
                readers.setdefault(node, []).append(item)
        results: dict[tuple[SourceStatement, int], list[fx.Node]] = {}
        iteration = loop_iterations(self._chain)
        for item, chain in self._chain.items():
            for node in item.makes if chain else ():
                if isinstance(item, Operation) and isinstance(node.meta.get("val"), (tuple, list)):
                    continue
                inside = [reader for reader in readers.get(node, ()) if chain[-1] in self._chain[reader]]
                if all(
                    self._chain[reader][-1] is chain[-1] and iteration[reader] != iteration[item] for reader in inside
                ):
                    results.setdefault((chain[-1], iteration[item]), []).append(node)
        names: dict[fx.Node, str] = {}
        if self._source is None:
            return names
        for (statement, _), nodes in results.items():
            targets = statement.targets
            if len(targets) == 1 and len({maker[node] for node in nodes}) == len(nodes):
                names |= dict.fromkeys(nodes, targets[0])
            elif len(targets) == len(nodes) and all(isinstance(maker[node], Operation) for node in nodes):
                names |= dict(zip(nodes, targets, strict=True))
            elif len(targets) > 1:
                calls = [(node, maker[node]) for node in nodes]
                found = {
                    node: self._source.unpacked_name(item.fqn, node)
                    for node, item in calls
                    if isinstance(item, ModuleCall)
                }
                names |= {node: name for node, name in found.items() if name is not None}
        return names

    def _find_chain(self, item: Item) -> tuple[SourceStatement, ...]:
        """The statements of the model's source that led to an item, outermost first."""
        assert self._source is not None
        if isinstance(item, Operation):
            return self._source.of_operation(item.node)
        call = item.calls[-1] if isinstance(item, ModuleLoop) else item
        return self._source.of_call(call.fqn, call.nodes[-1])


def _default_name(item: Item) -> str:
    """A name for what the model's source leaves unnamed."""
    if isinstance(item, Operation):
        target = item.node.target
        return _operation_name(target) if isinstance(target, torch._ops.OpOverload) else "part"
    parts = [part for part in (fqn_of(item) or "").split(".") if not part.isdigit()]
    return parts[-1] if parts else "x"


def _operation_name(target: torch._ops.OpOverload) -> str:
    return {"scaled_dot_product_attention": "attention"}.get(target._opname, target._opname.strip("_"))
