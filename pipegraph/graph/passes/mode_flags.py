"""What a model does in training mode only, in evaluation mode only, and in both.

A graph is the model in one mode. Dropout and batch norm carry their mode as an argument and are made to follow the
module's; the model's graph in the other mode tells which of them the model itself switches, and whether it switches
anything else.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from pipegraph.graph.captured import ModuleEntry
from pipegraph.graph.nodes import arguments_of, path_of, source_line
from pipegraph.graph.passes.view_layouts import any_layout

aten = torch.ops.aten
_DROPOUTS = (
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)


def may_differ_by_mode(graph: fx.Graph, modules: Mapping[str, ModuleEntry]) -> bool:
    """Whether the model could do something in evaluation mode that its graph in training mode does not show."""
    own = (node for node in graph.nodes if node.op == "call_function" and not _in_torch_layer(node, modules))
    return any(node.target in _DROPOUTS or _attention_dropout(node) for node in own) or any(
        _mentions_mode(cls) for cls in {type(module.module) for module in modules.values()}
    )


def mark_mode_differences(training: fx.Graph, evaluation: fx.Graph, modules: Mapping[str, ModuleEntry]) -> None:
    """Mark with ``meta["in_every_mode"]`` what drops values in evaluation mode too (``F.dropout(x)``), and warn if the
    modes differ in more than that."""
    first, second = (
        [node for node in graph.nodes if node.op == "call_function" and not _in_torch_layer(node, modules)]
        for graph in (training, evaluation)
    )
    waiting = deque(second)
    for node in first:
        while waiting and any_layout(waiting[0]) != any_layout(node) and _changes_nothing(waiting[0]):
            waiting.popleft()
        if waiting and _same_place(node, waiting[0]):
            other = waiting.popleft()
            if (node.target in _DROPOUTS and other.args[2]) or (_attention_dropout(node) and _attention_dropout(other)):
                node.meta["in_every_mode"] = True
        elif node.target not in (*_DROPOUTS, aten.contiguous.default):
            _warn(node)
            return
    left = [node for node in waiting if not _changes_nothing(node)]
    if left:
        _warn(left[0])


def _same_place(node: fx.Node, other: fx.Node) -> bool:
    """Whether two operations are one in two modes. A dropout may be missing in evaluation mode, where the next one must
    not be taken for it; so may ``contiguous()``, where the kernel that the mode calls left nothing to rearrange: a
    ``view`` in one mode is then the ``reshape`` of the other."""
    same = any_layout(node) == any_layout(other)
    return same and (node.target not in _DROPOUTS or source_line(node) == source_line(other))


def _changes_nothing(node: fx.Node) -> bool:
    """Of the graph in evaluation mode."""
    return (node.target in _DROPOUTS and not node.args[2]) or node.target is aten.contiguous.default


def _warn(node: fx.Node) -> None:
    warnings.warn(
        "Beyond dropout and batch norm, the model does not compute the same in evaluation mode; its stages do what it "
        f"does in training mode, also after .eval(). The first difference: {source_line(node)}",
        stacklevel=4,
    )


def _attention_dropout(node: fx.Node) -> bool:
    if node.target is not aten.scaled_dot_product_attention.default:
        return False
    return bool(arguments_of(node).get("dropout_p", 0.0))


def _in_torch_layer(node: fx.Node, modules: Mapping[str, ModuleEntry]) -> bool:
    """Whether a module of torch.nn made the node; that knows its modes itself."""
    path = path_of(node)
    owner: Any = modules[path[-1][1]].module if path and path[-1][1] in modules else None
    return owner is not None and type(owner).__module__.startswith("torch.nn")


def _mentions_mode(cls: type[nn.Module]) -> bool:
    """Whether the source of a class asks for its mode."""
    own = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    try:
        return any(".training" in inspect.getsource(base) for base in own)
    except (OSError, TypeError):
        return True
