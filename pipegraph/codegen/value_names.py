"""What the values of a ``forward`` are called: as in the model's source, wherever it says."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping

import torch
from torch import fx

from pipegraph.codegen.items import Item, Loop, ModuleCall, Operation, Scope
from pipegraph.codegen.origins import Origins, Statement
from pipegraph.codegen.turns import turns

# Operations that give the same tensor, or a part of it, in another shape or dtype.
_RESHAPING = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand"),
        *("transpose", "permute", "contiguous", "to", "select"),
    }
)


class ValueNames:
    """Names for the values of one scope.

    Without ``origins`` all values are called ``v``. ``wanted`` names values that the source leaves unnamed,
    ``parameters`` the arguments of the ``forward``. Of values whose name is one of ``clashes``, those that modules take
    under another name are called by that.
    """

    def __init__(
        self,
        scope: Scope,
        origins: Origins | None,
        wanted: Mapping[fx.Node, str],
        parameters: Mapping[fx.Node, str],
        clashes: Container[str] = (),
    ) -> None:
        self._clashes = clashes
        self._origins = origins
        self._wanted = wanted
        self._parameters = parameters
        self._chain = {item: self._find_chain(item) for item in scope.items} if origins else {}
        self._given = self._name_results(scope)

    def of(self, item: Item, node: fx.Node) -> str:
        """The name of a value that ``item`` makes."""
        if self._origins is None:
            return "v"
        name = self._in_source(item, node)
        return (self._origins.taken_as(node, name) or name) if name in self._clashes else name

    def _in_source(self, item: Item, node: fx.Node) -> str:
        named = self._given.get(node) or self._wanted.get(node) or self._inner_name(item, node)
        return named or self._helper_name(node) or self._name_of_content(node) or _default_name(item)

    def of_result(self, node: fx.Node) -> str:
        """The name of a value that is returned as an expression."""
        return self._wanted.get(node) or "output"

    def is_nameless(self, item: Item, node: fx.Node) -> bool:
        """Whether the source makes a value inside an expression, so that it may stand inside one again."""
        known = isinstance(item, Operation) or bool(self._chain.get(item))
        return self._origins is not None and node not in self._given and known

    def _name_of_content(self, node: fx.Node) -> str | None:
        """A tensor in another shape keeps its name: ``cos = cos.unsqueeze(1)``."""
        target = node.target
        while isinstance(target, torch._ops.OpOverload) and target._opname in _RESHAPING:
            if not isinstance(node.args[0], fx.Node):
                return None
            node = node.args[0]
            target = node.target
            name = self._given.get(node) or self._wanted.get(node) or self._parameters.get(node)
            if name:
                return name
        return _operation_name(target) if isinstance(target, torch._ops.OpOverload) else None

    def _inner_name(self, item: Item, node: fx.Node) -> str | None:
        """Where a call gives several values, what its own source calls each."""
        assert self._origins is not None
        outside = self._chain.get(item, ())
        several = len(item.makes) > 1 or (outside and len(outside[-1].targets) > 1)
        return self._origins.own_name(node) if several and not isinstance(item, Operation) else None

    def _helper_name(self, node: fx.Node) -> str | None:
        """What a function that ``forward`` calls names the result of one of its statements."""
        assert self._origins is not None
        statement = self._origins.of_helper(node)
        if statement is None or any(self._within(user, statement) for user in node.users):
            return None
        targets = statement.targets
        if node.target is operator.getitem and len(targets) == len(node.args[0].meta["val"]):  # type: ignore[union-attr]
            return targets[int(node.args[1])]  # type: ignore[arg-type]
        return targets[0] if len(targets) == 1 else None

    def _within(self, node: fx.Node, statement: Statement) -> bool:
        assert self._origins is not None
        return node.op == "call_function" and self._origins.is_within(node, statement)

    def _name_results(self, scope: Scope) -> dict[fx.Node, str]:
        """The values that the model's source names: what a statement leaves for others is what it assigns."""
        maker = {node: item for item in scope.items for node in item.makes}
        readers: dict[fx.Node, list[Item]] = {}
        for item in scope.items:
            for node in dict.fromkeys(item.reads):
                readers.setdefault(node, []).append(item)
        results: dict[tuple[Statement, int], list[fx.Node]] = {}
        turn = turns(self._chain)
        for item, chain in self._chain.items():
            for node in item.makes if chain else ():
                if isinstance(item, Operation) and isinstance(node.meta.get("val"), (tuple, list)):
                    continue
                inside = [reader for reader in readers.get(node, ()) if chain[-1] in self._chain[reader]]
                if all(self._chain[reader][-1] is chain[-1] and turn[reader] != turn[item] for reader in inside):
                    results.setdefault((chain[-1], turn[item]), []).append(node)
        names: dict[fx.Node, str] = {}
        if self._origins is None:
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
                    node: self._origins.unpacked_name(item.fqn, node)
                    for node, item in calls
                    if isinstance(item, ModuleCall)
                }
                names |= {node: name for node, name in found.items() if name is not None}
        return names

    def _find_chain(self, item: Item) -> tuple[Statement, ...]:
        """The statements of the model's source that led to an item, outermost first."""
        assert self._origins is not None
        if isinstance(item, Operation):
            return self._origins.of_operation(item.node)
        call = item.calls[-1] if isinstance(item, Loop) else item
        return self._origins.of_call(call.fqn, call.nodes[-1])


def _default_name(item: Item) -> str:
    """A name for what the model's source leaves unnamed."""
    if isinstance(item, Operation):
        target = item.node.target
        return _operation_name(target) if isinstance(target, torch._ops.OpOverload) else "part"
    fqn = item.calls[0].fqn if isinstance(item, Loop) else item.fqn
    parts = [part for part in fqn.split(".") if not part.isdigit()]
    return parts[-1] if parts else "x"


def _operation_name(target: torch._ops.OpOverload) -> str:
    return {"scaled_dot_product_attention": "attention"}.get(target._opname, target._opname.strip("_"))
