"""The ``with`` blocks of a model's source: ``torch.no_grad`` and ``torch.autocast``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from pipegraph.codegen.syntax.literals import literal


def common_regions(nodes: Sequence[fx.Node]) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """The ``with`` blocks that all of ``nodes`` stand in, outermost first."""
    common = nodes[0].meta["regions"] if nodes else ()
    for node in nodes:
        depth = 0
        while depth < min(len(common), len(node.meta["regions"])) and common[depth] == node.meta["regions"][depth]:
            depth += 1
        common = common[:depth]
    return tuple(common)


def headers(nodes: Sequence[fx.Node], around: int, device: str) -> tuple[str, ...]:
    """The headers of the blocks around some operations, the ``around`` outermost left out, and with them a ``no_grad``
    that no gradient would pass.

    Args:
        device: the expression of a device, for ``autocast``.
    """
    found = []
    for kind, settings in common_regions(nodes)[around:]:
        if kind == "autocast":
            _, dtype, enabled, cache = settings
            named = [f"dtype={literal(dtype)}"] if enabled and dtype is not None else []
            named += [f"enabled={enabled}"] if not enabled else []
            named += ["cache_enabled=False"] if enabled and cache is False else []
            found.append(f"with torch.autocast({', '.join([f'{device}.type', *named])}):")
        elif any("writes" in node.meta or node.meta["cut_off"] or _gradient_comes(node) for node in nodes):
            found.append("with torch.enable_grad():" if settings[0] else "with torch.no_grad():")
    return tuple(found)


def _gradient_comes(node: fx.Node) -> bool:
    return any(parent.meta["requires_grad"] for parent in node.all_input_nodes)
