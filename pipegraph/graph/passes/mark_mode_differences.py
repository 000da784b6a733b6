"""Mark what a model does in training mode only, in evaluation mode only, and in both.

A graph is the model in one mode. Dropout and batch norm carry their mode as an argument, and their source follows the
mode of the module. The graph of the other mode shows which of them the model itself switches, and whether it switches
anything else.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Mapping

import torch
from torch import fx, nn

from pipegraph.graph.captured import ModuleEntry
from pipegraph.graph.nodes import any_layout, arguments_of, path_of, source_line
from pipegraph.graph.operators import operator_of

aten = torch.ops.aten


def may_differ_by_mode(graph: fx.Graph, modules: Mapping[str, ModuleEntry]) -> bool:
    """Return whether the model could do something in evaluation mode that its graph in training mode does not show."""
    return any(
        operator_of(node).dropout or _attention_dropout(node) for node in _own_operations(graph, modules)
    ) or any(_mentions_mode(cls) for cls in {type(entry.module) for entry in modules.values()})


def mark_mode_differences(graph: fx.Graph, evaluation: fx.Graph, modules: Mapping[str, ModuleEntry]) -> None:
    """Mark what drops values in evaluation mode too, and warn if the modes differ in more than that.

    before:  y = dropout(x, 0.1, True)      in ``evaluation`` as well
    after:   y = dropout(x, 0.1, True)      # in_every_mode: F.dropout(x), without training=self.training
    """
    waiting = deque(_own_operations(evaluation, modules))
    for node in _own_operations(graph, modules):
        while waiting and any_layout(waiting[0]) != any_layout(node) and _changes_nothing(waiting[0]):
            waiting.popleft()
        if waiting and _is_same_operation(node, waiting[0]):
            other = waiting.popleft()
            drops = operator_of(node).dropout and other.args[2]
            if drops or (_attention_dropout(node) and _attention_dropout(other)):
                node.meta["in_every_mode"] = True
        elif not operator_of(node).dropout and node.target is not aten.contiguous.default:
            _warn(node)
            return
    left = [node for node in waiting if not _changes_nothing(node)]
    if left:
        _warn(left[0])


def _own_operations(graph: fx.Graph, modules: Mapping[str, ModuleEntry]) -> list[fx.Node]:
    """The operations outside modules of torch.nn, which follow their mode themselves."""
    return [node for node in graph.nodes if node.op == "call_function" and not _in_torch_module(node, modules)]


def _in_torch_module(node: fx.Node, modules: Mapping[str, ModuleEntry]) -> bool:
    path = path_of(node)
    owner = modules.get(path[-1][1]) if path else None
    return owner is not None and type(owner.module).__module__.startswith("torch.nn")


def _is_same_operation(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two operations are one in two modes.

    A dropout may be missing in evaluation mode; the next one must not be taken for it. ``contiguous()`` may be missing
    too, if the kernel that the mode calls left nothing to rearrange: a ``view`` in one mode is then the ``reshape`` of
    the other.
    """
    same = any_layout(node) == any_layout(other)
    return same and (not operator_of(node).dropout or source_line(node) == source_line(other))


def _changes_nothing(node: fx.Node) -> bool:
    """Return whether an operation in evaluation mode has no effect."""
    return (operator_of(node).dropout and not node.args[2]) or node.target is aten.contiguous.default


def _warn(node: fx.Node) -> None:
    warnings.warn(
        "Beyond dropout and batch norm, the model does not compute the same in evaluation mode; its stages do what it "
        f"does in training mode, also after .eval(). The first difference: {source_line(node)}",
        stacklevel=5,
    )


def _attention_dropout(node: fx.Node) -> bool:
    attention = node.target is aten.scaled_dot_product_attention.default
    return attention and bool(arguments_of(node).get("dropout_p", 0.0))


def _mentions_mode(cls: type[nn.Module]) -> bool:
    """Return whether the source of a class asks for its mode."""
    own = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    try:
        return any(".training" in inspect.getsource(base) for base in own)
    except (OSError, TypeError):
        return True
