"""What one ``with`` block holds: neighbours that ran in the same ``no_grad`` and ``autocast`` blocks of the model."""

from __future__ import annotations

from itertools import groupby

from torch import fx

from pipegraph.codegen.expressions.operation import common_regions, contexts
from pipegraph.codegen.forward.items import ClassContents, Item, with_inner
from pipegraph.codegen.syntax.expressions import Expression


class WithBlocks:
    """Finds the blocks around the items of one class.

    Args:
        contents: the class.
        device: the expression of its device.
    """

    def __init__(self, contents: ClassContents, device: Expression) -> None:
        self._outer, self._device = contents.outer_regions, device
        self._together: dict[Item, tuple[fx.Node, ...]] = {}
        for _, group in groupby(with_inner(contents.items), key=lambda item: common_regions(item.nodes)):
            items = list(group)
            self._together |= dict.fromkeys(items, tuple(node for item in items for node in item.nodes))

    def around(self, item: Item) -> tuple[Expression, ...]:
        """The context managers around an item, outermost first: those that one of its neighbours needs as well."""
        return contexts(self._together.get(item, item.nodes), self._outer, self._device)
