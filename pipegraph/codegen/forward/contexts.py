"""The ``with`` blocks of a model's source: ``torch.no_grad`` and ``torch.autocast``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from pipegraph.codegen.syntax.expressions import Attribute, Expression, call, literal


def common_regions(nodes: Sequence[fx.Node]) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """The ``with`` blocks that all of ``nodes`` stand in, outermost first."""
    common = nodes[0].meta["regions"] if nodes else ()
    for node in nodes:
        depth = 0
        while depth < min(len(common), len(node.meta["regions"])) and common[depth] == node.meta["regions"][depth]:
            depth += 1
        common = common[:depth]
    return tuple(common)


def contexts(nodes: Sequence[fx.Node], outer: int, device: Expression) -> tuple[Expression, ...]:
    """The context managers around some operations, outermost first; a ``no_grad`` that changes nothing is left out.

    Args:
        outer: so many of the outermost blocks stand around the whole class, and are left out too.
        device: the expression of a device, for ``autocast``.
    """
    found: list[Expression] = []
    for kind, settings in common_regions(nodes)[outer:]:
        if kind == "autocast":
            _, dtype, enabled, cache = settings
            options = {"dtype": literal(dtype)} if enabled and dtype is not None else {}
            options |= {} if enabled else {"enabled": literal(enabled)}
            options |= {"cache_enabled": literal(False)} if enabled and cache is False else {}
            found.append(call("torch.autocast", Attribute(device, "type"), **options))
        elif any("writes" in node.meta or node.meta["cut_off"] or _gradient_flows_in(node) for node in nodes):
            found.append(call("torch.enable_grad" if settings[0] else "torch.no_grad"))
    return tuple(found)


def _gradient_flows_in(node: fx.Node) -> bool:
    return any(parent.meta["requires_grad"] for parent in node.all_input_nodes)
