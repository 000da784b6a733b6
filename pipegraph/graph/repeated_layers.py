"""Capture a model of many equal layers with a few of them, and give its graph the others.

layers.0 ─ layers.1 ─ layers.2 ─▶ captured, with the operations of layers.2 again for layers.3 … layers.125

A layer is equal to the one before it if both have the same classes, attributes, and shapes, but for numbers that grow
by one, as a layer's index does. That the model does the same in each is checked: it is run once whole on fake tensors,
in each mode, and must run the operations of its few layers again, on the corresponding values. A model for which this
does not hold is captured whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from torch import fx, nn

from pipegraph.graph.calls import FunctionRun, functions_of
from pipegraph.graph.captured import BRANCH, PIPE_SPLITS, Captured, ExecutedLines
from pipegraph.graph.layer_blocks import LayerBlock, LayerNames, NotRepeatedError, blocks_of
from pipegraph.graph.layer_runs import KEPT_UNITS, LayerRun
from pipegraph.graph.model_structure import modules_of, state_of
from pipegraph.graph.nodes import label_of, path_of
from pipegraph.graph.pass_order import run_passes
from pipegraph.torch_private.export import call_name
from pipegraph.torch_private.pytrees import pytree

_T = TypeVar("_T")


def with_all_layers(captured: Captured, model: nn.Module, runs: Sequence[LayerRun]) -> Captured:
    """Return what was captured of a few layers of a model, with all of them. Its graph is changed.

    Raises:
        NotRepeatedError: the graph says nothing of the other layers.
    """
    if captured.hooks or captured.other_sizes or captured.evaluation_outputs is not None:
        raise NotRepeatedError
    names = LayerNames(runs)
    state, tensors = state_of(model)
    for fqn, entry in captured.state.items():
        if entry.kind == "constant":
            if names.run_of(fqn) is not None:
                raise NotRepeatedError  # each layer has its own
            name = names.in_whole_model(fqn)
            state[name] = replace(entry, fqn=name, canonical=names.in_whole_model(entry.canonical))
            tensors[name] = captured.tensors[fqn]
    labels = [*map(label_of, captured.returned)]
    run_passes(captured.graph, [lambda graph: _Extension(captured, runs, names).run()], state)
    new_labels = dict(zip(labels, map(label_of, captured.returned), strict=True))  # the last layer's may be returned
    outputs = pytree.tree_map_only(str, lambda label: new_labels.get(label, label), captured.outputs)
    lines = captured.lines and _lines(captured.lines, names)
    return replace(captured, state=state, tensors=tensors, modules=modules_of(model), lines=lines, outputs=outputs)


_BY_CALL: Final = ("argument_of", "result_of", "variables", "checkpointed")
"""Metadata by the names of calls."""
_PLACES: Final = dict.fromkeys((*_BY_CALL, "path", "functions", BRANCH, "writes", "val"))
"""Metadata in which the operations of two layers differ."""
_LEFT_OUT: Final = "+"
"""Before the name of a call that only the whole model has."""


class _Extension:
    """Gives a graph the operations of the layers that are left out."""

    def __init__(self, captured: Captured, runs: Sequence[LayerRun], names: LayerNames) -> None:
        self._graph, self._nodes, self._runs, self._names = captured.graph, captured.nodes, runs, names
        self._branches = max((node.meta[BRANCH].number for node in self._nodes if BRANCH in node.meta), default=0)

    def run(self) -> None:
        position = {node: at for at, node in enumerate(self._nodes)}
        starts: dict[tuple[str, int], list[int]] = {}
        calls = set[str]()
        for at, node in enumerate(self._nodes):
            if node.meta.get(PIPE_SPLITS):
                raise NotRepeatedError
            for call, fqn in path_of(node):
                layer = self._names.run_of(fqn)
                if layer is None or fqn != layer[0].prefix(layer[1]) or call in calls:
                    continue
                calls.add(call)
                starts.setdefault((layer[0].name, layer[1]), []).append(at)
        blocks = blocks_of(self._runs, starts)
        for block in blocks:
            self._check(block, position)
        inside = {self._nodes[at] for block in blocks for at in (*block.previous, *block.template)}
        for node in self._graph.nodes:  # what every layer reads
            for block in blocks:
                if node not in inside and (node.op != "get_attr" or self._names.run_of(str(node.target)) is None):
                    self._repeat_places(node, block)
        metadata = {node: dict(node.meta) for node in inside}
        for node in self._graph.nodes:
            self._rename(node, {}, 0)
        for block in blocks:
            self._extend(block, metadata)

    def _check(self, block: LayerBlock, position: Mapping[fx.Node, int]) -> None:
        """Check that the template is the layer before it, one later. Raises NotRepeatedError."""
        if block.template.stop > len(self._nodes) or len(block.previous) != block.length:
            raise NotRepeatedError
        for at in block.template:
            node, twin = self._nodes[at], self._nodes[at - block.length]
            leaves, form = pytree.tree_flatten((node.args, node.kwargs))
            twin_leaves, twin_form = pytree.tree_flatten((twin.args, twin.kwargs))
            is_alike = node.target is twin.target and form == twin_form
            if not is_alike or not all(
                self._corresponds(block, leaf, twin_leaf, position)
                for leaf, twin_leaf in zip(leaves, twin_leaves, strict=True)
            ):
                raise NotRepeatedError
            later_path = tuple(self._call(call, fqn, block.runs, 1) for call, fqn in path_of(twin))
            if path_of(node) != later_path or {**node.meta, **_PLACES} != {**twin.meta, **_PLACES}:
                raise NotRepeatedError  # as where layers share a module, of which each call has a number
        for at in block.previous:
            if any(position.get(user, len(position)) >= block.template.stop for user in self._nodes[at].users):
                raise NotRepeatedError  # what follows the layers reads more than the last one

    def _corresponds(self, block: LayerBlock, leaf: Any, twin: Any, position: Mapping[fx.Node, int]) -> bool:
        if not isinstance(leaf, fx.Node) or not isinstance(twin, fx.Node):
            return type(leaf) is type(twin) and bool(leaf == twin)
        if leaf.op == "get_attr":
            name, twin_name = str(leaf.target), str(twin.target)
            layer = self._names.run_of(name)
            if layer is None or layer[0].name not in block.runs:
                return leaf is twin
            run, index = layer
            suffix = name[len(run.prefix(index)) :]
            twin_layer = run.prefix(index - run.period)
            return twin.op == "get_attr" and index in run.template and twin_name == f"{twin_layer}{suffix}"
        at, twin_at = position.get(leaf, -1), position.get(twin, -1)
        if at in block.template:
            return twin_at == at - block.length
        if at in block.previous:
            return block.starts[-3] <= twin_at < block.starts[-2]
        return leaf is twin

    # ---- copies ------------------------------------------------------------------------------------------------------

    def _extend(self, block: LayerBlock, metadata: Mapping[fx.Node, dict[str, Any]]) -> None:
        """Insert the operations of the layers of a block that are left out, and let what follows read the last one.

        Args:
            metadata: of the nodes of the block, with the names of the model of few layers.
        """
        template = [self._nodes[at] for at in block.template]
        template_of = dict(zip((self._nodes[at] for at in block.previous), template, strict=True))
        previous_of = {node: twin for twin, node in template_of.items()}
        state = self._state_groups(block)
        outside = {node: [user for user in node.users if user not in previous_of] for node in template}
        last, last_state = template[-1], [group[-1] for group in state]
        copies: dict[fx.Node, fx.Node] = {node: node for node in template}
        for index in range(1, block.left_out + 1):
            values: dict[fx.Node, fx.Node] = {node: copies[twin] for node, twin in template_of.items()}
            for number, group in enumerate(state):
                for node in group:
                    with self._graph.inserting_after(last_state[number]):
                        last_state[number] = values[node] = self._copy_state(node, block, index)
            copies = {}
            for node in template:
                with self._graph.inserting_after(last):
                    last = copies[node] = values[node] = self._graph.node_copy(node, partial(_value, values))
                # The last layer is followed by what follows the template, all others by another layer.
                if index == block.left_out:
                    last.meta = dict(metadata[node])
                    self._rename(last, block.runs, index)
                else:
                    last.meta = dict(metadata[previous_of[node]])
                    self._rename(last, block.runs, index + 1)
                if (owner := node.meta.get("writes")) is not None:
                    names = {value.name: copy.name for value, copy in values.items()}
                    last.meta["writes"] = names.get(owner, owner)
        for node in template:
            owner = node.meta.get("writes")
            node.meta = dict(metadata[previous_of[node]])
            self._rename(node, block.runs, 1)
            if owner is not None:
                node.meta["writes"] = owner
        for node, users in outside.items():
            for user in users:
                user.replace_input_with(node, copies[node])

    def _state_groups(self, block: LayerBlock) -> list[list[fx.Node]]:
        """The tensors of the template in the order of the graph, in groups of neighbors: the buffers of a layer follow
        the parameters of all layers."""
        groups: list[list[fx.Node]] = []
        is_after_other = True
        for node in self._graph.find_nodes(op="get_attr"):
            if self._names.is_in_template(str(node.target), block.runs):
                groups += [[]] if is_after_other else []
                groups[-1].append(node)
                is_after_other = False
            else:
                is_after_other = True
        return groups

    def _copy_state(self, node: fx.Node, block: LayerBlock, index: int) -> fx.Node:
        target = self._names.of_layer(str(node.target), block.runs, index)
        copy = self._graph.create_node("get_attr", target, name=node.name)
        copy.meta = dict(node.meta)
        self._rename(copy, block.runs, index)
        return copy

    # ---- names -------------------------------------------------------------------------------------------------------

    def _repeat_places(self, node: fx.Node, block: LayerBlock) -> None:
        """Let what a node says of calls in the template hold for the layers that are left out as well."""
        for key in _BY_CALL:
            items = list(node.meta.get(key, {}).items())
            of_template = [at for at, (call, _) in enumerate(items) if self._names.is_in_template(call, block.runs)]
            if of_template:
                end = of_template[-1] + 1
                repeated = {
                    _LEFT_OUT + self._names.of_layer(call, block.runs, index): places
                    for index in range(1, block.left_out + 1)
                    for call, places in (items[at] for at in of_template)
                }
                node.meta[key] = {**dict(items[:end]), **repeated, **dict(items[end:])}

    def _rename(self, node: fx.Node, runs: Mapping[str, LayerRun], index: int) -> None:
        """Give what a node says of calls the names of a layer.

        Args:
            runs: the runs of the layer; none for a node that is not left out.
            index: how many layers later it is.
        """

        def name_of(name: str) -> str:
            if name.startswith(_LEFT_OUT):  # it has its name in the whole model
                return name.removeprefix(_LEFT_OUT)
            return self._names.of_layer(name, runs, index) if runs else self._names.in_whole_model(name)

        meta = node.meta
        if node.op == "get_attr" and not runs:
            node.target = name_of(str(node.target))
        if "path" in meta:
            meta["path"] = tuple(self._call(call, fqn, runs, index) for call, fqn in meta["path"])
        for key in _BY_CALL:
            if key in meta:
                meta[key] = {name_of(call): places for call, places in meta[key].items()}
        if meta.get("functions"):
            meta["functions"] = tuple(self._function(run, name_of(run.call)) for run in functions_of(node))
        if runs and BRANCH in meta:
            number = meta[BRANCH].number + index * (self._branches + 1)
            meta[BRANCH] = meta[BRANCH]._replace(number=number)

    def _call(self, call: str, fqn: str, runs: Mapping[str, LayerRun], index: int) -> tuple[str, str]:
        """A call and its module, in a layer that is ``index`` later."""
        name = call_name(call)
        name_in_layer = self._names.of_layer(name, runs, index)
        return call[: len(call) - len(name)] + name_in_layer, self._names.of_layer(fqn, runs, index)

    @staticmethod
    def _function(run: FunctionRun, call: str) -> FunctionRun:
        return run if run.call == call else replace(run, call=call)


def _value(values: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return values.get(node, node)


def _lines(lines: ExecutedLines, names: LayerNames) -> ExecutedLines:
    """The lines that ran, of all layers."""
    return ExecutedLines(
        _of_all_layers(lines.modules, names),
        lines.functions,
        _of_all_layers(lines.none_variables, names),
        _of_all_layers(lines.forwards, names),
        lines.constants,
    )


def _of_all_layers(by_name: Mapping[str, _T], names: LayerNames) -> dict[str, _T]:
    """What holds of modules, by their names, with those of the layers that are left out."""
    all_names: dict[str, _T] = {}
    for fqn, value in by_name.items():
        all_names[names.in_whole_model(fqn)] = value
        layer = names.run_of(fqn)
        if layer is not None and layer[1] in layer[0].template:
            run = layer[0]
            for index in range(1, run.units - KEPT_UNITS + 1):
                all_names[names.of_layer(fqn, {run.name: run}, index)] = value
    return all_names
