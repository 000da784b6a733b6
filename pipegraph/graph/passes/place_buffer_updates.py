"""Move assignments to buffers next to the operations that make their values."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
from torch import fx

from pipegraph.graph.aliasing import readers_of, written_by


def place_buffer_updates(graph: fx.Graph) -> None:
    """Move the update of a buffer that ``forward`` assigns to (``self.mean = …``) behind the last operation that needs
    the old value; ``torch.export`` has it at the very end, which is in the last stage.

    The update is erased if its value is the buffer itself, changed in place (``self.count += 1``).

    before:  m = lerp(mean, x, 0.1);  y = sub(x, m);  z = linear(y, weight);  copy_(mean, m)
    after:   m = lerp(mean, x, 0.1);  copy_(mean, m);  y = sub(x, m);  z = linear(y, weight)
    """
    for node in _last_copies(graph):
        buffer, value = node.args[:2]
        if buffer.op != "get_attr" or node.meta["path"]:
            continue
        if _is_update(value, buffer):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            continue
        last = max([value, *(reader for reader in readers_of(buffer) if reader is not node)])
        if last.op == "call_function" and last.meta["path"] == value.meta.get("path"):
            last.append(node)
            node.meta |= {"path": last.meta["path"], "regions": last.meta["regions"]}


def _last_copies(graph: fx.Graph) -> list[Any]:
    """The copies with no other operation behind them; a ``copy_`` that the model itself calls is not there."""
    operations = [node for node in graph.nodes if node.op == "call_function"]
    last = takewhile(lambda node: node.target is torch.ops.aten.copy_.default, reversed(operations))
    return list(last)[::-1]


def _is_update(value: fx.Node, buffer: fx.Node) -> bool:
    """Return whether ``value`` is ``buffer`` itself, after writes into it."""
    while value is not buffer:
        written = written_by(value)
        if not written:
            return False
        value = written[0]
    return True
