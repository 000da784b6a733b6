"""What a package says in the model's own words: the names of values and arguments, and the docstrings of classes."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import fx

from pipegraph.codegen.names.docstrings import prose, signature
from pipegraph.codegen.names.identifiers import unused, variable
from pipegraph.codegen.names.source_statements import Origins
from pipegraph.graph.call_arguments import argument_place
from pipegraph.graph.call_tree import CallTree
from pipegraph.graph.captured import Captured

_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten.type_as.default)


class Words:
    """Looks names up in the model's source.

    ``opened`` are the calls that stages spread out. ``returned_together`` collects the values of calls that return
    several: the caller's statement does not tell them apart.
    """

    def __init__(self, captured: Captured, origins: Origins, opened: AbstractSet[str]) -> None:
        self._captured = captured
        self._origins = origins
        self._opened = opened
        self.returned_together: set[fx.Node] = set()

    def parameters(self, call: CallTree, reads: Sequence[fx.Node]) -> list[str]:
        """Names for the arguments of ``forward``: the module's own for what it was handed, else the values' names."""
        names: list[str] = []
        for node in reads:
            place = argument_place(node, call.call)
            wanted = place.name if place is not None and place.name else self.value_name(node)
            names.append(unused(variable(wanted or "x", "x"), names))
        return names

    def value_name(self, node: fx.Node, default: str | None = None) -> str:
        """What the model's source calls a value; where it does not say, ``default`` or the operation's name."""
        if node.op != "call_function":
            return str(node.target).rpartition(".")[2]
        for _, fqn in node.meta["path"]:
            name = self._origins.unpacked_name(fqn, node)
            if name is not None:
                return name
        # The outermost call that ends with the value names it best: it speaks the caller's language.
        for call, fqn in node.meta["path"] if node not in self.returned_together else ():
            ends = all(call not in dict(user.meta.get("path", ())) for user in node.users)
            chain = self._origins.of_call(fqn, node) if ends and call not in self._opened else ()
            if chain and len(chain[-1].targets) == 1:
                return chain[-1].targets[0]
        chain = tuple(each for each in self._origins.of_operation(node) if not each.is_of_torch)
        if chain and len(chain[-1].targets) == 1:
            return chain[-1].targets[0]
        if node.target in _CASTS and isinstance(node.args[0], fx.Node):
            return self.value_name(node.args[0], default)  # a cast keeps the name
        operation = node.target._opname.strip("_") if isinstance(node.target, torch._ops.OpOverload) else "x"
        return default or operation

    def is_whole(self, call: CallTree) -> bool:
        """Whether a stage holds all operations of a call."""
        return len(list(call.nodes())) == self._captured.operations_of[call.call]

    def docstring(
        self, call: CallTree, parameters: Sequence[str], reads: Sequence[fx.Node], makes: Sequence[fx.Node]
    ) -> str:
        """What a class is, where it stands in the model, and the shapes that it takes and gives there."""
        module = self._captured.modules[call.fqn]
        source = f" ({prose(module.source)})" if module.source else ""
        where = "as in" if self.is_whole(call) else "a part of it, as in"
        return f"{prose(module.class_name)}{source}, {where} {prose(call.fqn)}.  {signature(parameters, reads, makes)}."
