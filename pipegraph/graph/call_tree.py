"""The module calls over a run of operations, nested as the model nests them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from pipegraph.graph.nodes import helpers_of, path_of


@dataclass
class CallTree:
    """One call of a module: the operations of its ``forward`` and the calls it makes, in order.

    Attributes:
        call: its name, of which two calls of one module have each their own.
        fqn: the module; "" is the model itself.
        items: its operations and inner calls.
    """

    call: str
    fqn: str
    items: list[fx.Node | CallTree] = field(default_factory=list)

    def nodes(self) -> Iterator[fx.Node]:
        """All operations of the call, those of inner calls included, in order."""
        for item in self.items:
            if isinstance(item, CallTree):
                yield from item.nodes()
            else:
                yield item

    def descendants(self) -> Iterator[CallTree]:
        """All calls inside, however deep."""
        for call in self.calls():
            yield call
            yield from call.descendants()

    def calls(self) -> Iterator[CallTree]:
        """The calls that this one makes itself."""
        return (item for item in self.items if isinstance(item, CallTree))


def call_tree(nodes: Sequence[fx.Node], helpers: bool = False) -> CallTree:
    """Nest ``nodes`` by the module calls they ran in; of a call that ran more operations, the tree holds these.

    Args:
        helpers: whether to nest them also by the calls of functions inside the innermost ``forward``. Those bear the
            FQN "", because no parameter is theirs.
    """
    root = CallTree(call="", fqn="")
    stack = [root]
    for node in nodes:
        path = path_of(node)
        if helpers:
            path = (*path, *((call, "") for call in helpers_of(node)))
        depth = 0
        while depth < len(path) and depth + 1 < len(stack) and stack[depth + 1].call == path[depth][0]:
            depth += 1
        del stack[depth + 1 :]
        for call, fqn in path[depth:]:
            inner = CallTree(call=call, fqn=fqn)
            stack[-1].items.append(inner)
            stack.append(inner)
        stack[-1].items.append(node)
    return root
