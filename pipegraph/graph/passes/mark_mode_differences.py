"""Mark what a model does in training mode only, in evaluation mode only, and in both.

A graph is the model in one mode. Dropout and batch norm carry their mode as an argument, and their source follows the
mode of the module. The graph of the other mode shows which of them the model itself switches, and whether it switches
anything else.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from pipegraph.graph.captured import ModuleEntry
from pipegraph.graph.class_text import class_text, is_layer_of_torch
from pipegraph.graph.mode_comparison import OtherGraphError
from pipegraph.graph.nodes import arguments_of, path_of, replace_node, source_line
from pipegraph.graph.operators import operator_of
from pipegraph.graph.passes.merge_modes import merge_modes

aten = torch.ops.aten


def may_differ_by_mode(graph: fx.Graph, modules: Mapping[str, ModuleEntry]) -> bool:
    """Return whether the model could do something in evaluation mode that its graph in training mode does not show."""
    return any(
        operator_of(node).dropout or _attention_dropout(node) for node in _own_operations(graph, modules)
    ) or any(_mentions_mode(cls) for cls in {type(entry.module) for entry in modules.values()})


def mark_mode_differences(graph: fx.Graph, evaluation: fx.Graph, modules: Mapping[str, ModuleEntry]) -> None:
    """Mark what drops values in evaluation mode too, and make branches of what only one mode does.

    A warning names the first difference that is no branch inside a ``forward``.

    before:  y = dropout(x, 0.1, True)      in ``evaluation`` as well
    after:   y = dropout(x, 0.1, True)      # in_every_mode: F.dropout(x), without training=self.training
    """
    try:
        _mark_dropouts(_own_operations(graph, modules), _own_operations(evaluation, modules))
        merge_modes(graph, evaluation, modules)
    except OtherGraphError as error:
        _warn(error.node)


def _mark_dropouts(own: Sequence[fx.Node], other: Sequence[fx.Node]) -> None:
    """Mark the dropouts of both graphs that drop values in evaluation mode too.

    A dropout may be missing in evaluation mode; the next one must not be taken for it.
    """
    dropouts = _with_mode(own)
    for where, twins in _with_mode([node for node in other if operator_of(node).dropout]).items():
        if any(twin.args[2] for twin in twins):
            nodes = dropouts.get(where, [])
            if len(nodes) != len(twins):
                raise OtherGraphError(twins[0])
            for node, twin in zip(nodes, twins, strict=True):
                node.meta["in_every_mode"] = twin.meta["in_every_mode"] = bool(twin.args[2])


def settle_fixed_modes(
    graph: fx.Graph, evaluation: fx.Graph | None, modules: Mapping[str, ModuleEntry], mode: Mapping[nn.Module, bool]
) -> None:
    """Keep switched off what the source switches off although the module around it is in training mode:
    ``F.dropout(x, training=False)`` is taken out, and ``F.batch_norm(x, mean, variance, training=False)`` is marked.
    What is not settled here follows the mode of the module.

    before:  y = dropout(x, 0.1, False);  z = relu(y)      in ``evaluation`` as well, if there is one
    after:   z = relu(x)

    Args:
        mode: in which each module was traced in ``graph``.
    """
    twins = _with_mode(_own_operations(evaluation, modules)) if evaluation is not None else {}
    for place, nodes in _with_mode(_own_operations(graph, modules)).items():
        others = twins.get(place, [])
        for node, twin in zip(nodes, others if len(others) == len(nodes) else [None] * len(nodes), strict=True):
            around = modules[path_of(node)[-1][1] if path_of(node) else ""].module
            same = {each for each in (node, twin) if each is not None}
            if not mode[around] or any(map(_is_on, same)):
                continue
            for each in same:
                if operator_of(each).dropout:
                    replace_node(each, each.args[0])
                else:
                    each.meta["in_every_mode"] = True


def _with_mode(nodes: Sequence[fx.Node]) -> dict[object, list[fx.Node]]:
    """The dropouts and batch norms by the module that runs them and their line."""
    found: dict[object, list[fx.Node]] = {}
    for node in nodes:
        if operator_of(node).dropout or node.target is aten.batch_norm.default:
            place = operator_of(node).dropout, tuple(fqn for _, fqn in path_of(node)), source_line(node)
            found.setdefault(place, []).append(node)
    return found


def _is_on(node: fx.Node) -> bool:
    """Return whether a dropout or a batch norm does as in training mode."""
    named = arguments_of(node)
    return bool(named.get("train", named.get("training", False)))


def _own_operations(graph: fx.Graph, modules: Mapping[str, ModuleEntry]) -> list[fx.Node]:
    """The operations outside modules of torch.nn, which follow their mode themselves."""
    return [node for node in graph.nodes if node.op == "call_function" and not _in_torch_module(node, modules)]


def _in_torch_module(node: fx.Node, modules: Mapping[str, ModuleEntry]) -> bool:
    path = path_of(node)
    owner = modules.get(path[-1][1]) if path else None
    return owner is not None and is_layer_of_torch(type(owner.module))


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
    own = [base for base in cls.__mro__ if base not in (nn.Module, object) and not is_layer_of_torch(base)]
    return any(found is None or ".training" in found.text for found in map(class_text, own))
