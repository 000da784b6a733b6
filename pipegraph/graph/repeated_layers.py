"""Capture a model of many equal layers with a few of them, and give its graph the others.

layers.0 ─ layers.1 ─ layers.2 ─▶ captured, with the operations of layers.2 again for layers.3 … layers.125

A layer is equal to the one before it if both have the same classes, attributes, and shapes, but for numbers that grow
by one, as a layer's index does. That the model does the same in each is checked: it is run once whole on fake tensors,
in each mode, and must run the operations of its few layers again, on the corresponding values. A model for which this
does not hold is captured whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import fx, nn

from pipegraph.graph.calls import FunctionRun, functions_of
from pipegraph.graph.captured import BRANCH, PIPE_SPLITS, Captured, ExecutedLines
from pipegraph.graph.export.operation_record import Operations, Result
from pipegraph.graph.model_structure import modules_of, state_of
from pipegraph.graph.nodes import path_of
from pipegraph.graph.pass_order import run_passes
from pipegraph.torch_private.export import call_name
from pipegraph.torch_private.pytrees import pytree

_T = TypeVar("_T")

KEPT: Final = 3
"""Units that are captured: the last is captured after one that is captured after another."""
_LONGEST: Final = 8  # period, of layers of several kinds
_LEAST: Final = 5  # layers that are left out; the run of the whole model takes the time of about one


class NotRepeatedError(Exception):
    """The graph of a few layers says nothing of the others."""


# ---- which layers are equal ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerRun:
    """Units of consecutive layers of a list that are equal: single layers, or a period of layers of several kinds.

    Attributes:
        name: of the list.
        start: its first layer.
        period: how many layers a unit has.
        units: how many units there are.
        layers: the list.
    """

    name: str
    start: int
    period: int
    units: int
    layers: nn.Module

    @property
    def template(self) -> range:
        """The indices of the layers whose operations are those of all that are left out."""
        stop = self.start + KEPT * self.period
        return range(stop - self.period, stop)

    @property
    def left_out(self) -> range:
        """The indices of the layers that are left out."""
        return range(self.template.stop, self.start + self.units * self.period)

    @property
    def equal_layers(self) -> dict[str, nn.Module]:
        """The layers of the run, by their names."""
        layers = list(self.layers.children())
        return {self.prefix(index): layers[index] for index in range(self.start, self.left_out.stop)}

    def prefix(self, index: int) -> str:
        """The name of a layer."""
        return f"{self.name}.{index}"


def layer_runs(model: nn.Module) -> list[LayerRun]:
    """Return the runs of equal layers that are worth to be captured in part: at most one of a list, and none inside of
    a list that has one."""
    if _shares_layers(model):
        return []
    runs: list[LayerRun] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(_is_inside(name, run.name) for run in runs):
            continue
        if name and list(module._modules) == [str(number) for number in range(len(module))]:
            candidates = (_longest_run(name, module, period) for period in range(1, _LONGEST + 1))
            best = max(candidates, key=lambda run: len(run.left_out))
            runs += [best] if len(best.left_out) >= _LEAST else []
    return runs


def _longest_run(name: str, layers: nn.ModuleList | nn.Sequential, period: int) -> LayerRun:
    """The run with most units of a number of layers; the first one of several."""
    best = LayerRun(name, 0, period, 0, layers)
    modules, start = list(layers.children()), 0
    for index in range(period, len(modules) + 1):
        if index == len(modules) or not _are_equal(modules[index - period], modules[index], period):
            run = LayerRun(name, start, period, (index - start) // period, layers)
            best = max(best, run, key=lambda candidate: candidate.units)
            start = index - period + 1
    return best


def _shares_layers(model: nn.Module) -> bool:
    """Return whether a tensor that has several names is in a list of layers."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parts = {part for group in names.values() if len(group) > 1 for name in group for part in name.split(".")}
    return any(part.isdecimal() for part in parts)


def _is_inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


_HOOKS: Final = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_CHILDREN: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS)


def _are_equal(module: nn.Module, other: nn.Module, step: int) -> bool:
    """Return whether a module is another one, but for its tensors, and for numbers that are larger by ``step``."""
    if type(module) is not type(other) or module is other or module.training != other.training:
        return False
    if any(vars(owner).get(name) for owner in (module, other) for name in _HOOKS):
        return False
    attributes, other_attributes = (
        {name: value for name, value in vars(owner).items() if name not in _CHILDREN} for owner in (module, other)
    )
    if attributes.keys() != other_attributes.keys() or not all(
        _same_value(value, other_attributes[name], step) for name, value in attributes.items()
    ):
        return False
    for kind in ("_parameters", "_buffers", "_modules"):
        if list(vars(module)[kind]) != list(vars(other)[kind]):
            return False
    tensors = zip(module._parameters.values(), other._parameters.values(), strict=True)
    buffers = zip(module._buffers.values(), other._buffers.values(), strict=True)
    if not all(_same_form(first, second) for first, second in tensors):
        return False
    if not all(_same_form(first, second) and _same_numbers(first, second) for first, second in buffers):
        return False
    if module._non_persistent_buffers_set != other._non_persistent_buffers_set:
        return False
    children = zip(module._modules.values(), other._modules.values(), strict=True)
    return all(
        first is second is None or (first is not None and second is not None and _are_equal(first, second, step))
        for first, second in children
    )


def _same_value(value: Any, other: Any, step: int) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if type(value) is int:
        return value == other or other - value == step
    if isinstance(value, (tuple, list)):
        return len(value) == len(other) and all(_same_value(*pair, 0) for pair in zip(value, other, strict=True))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same_value(value[key], other[key], 0) for key in value)
    if isinstance(value, (bool, float, str, torch.dtype, torch.device, torch.Size)):
        return bool(value == other)
    # Such as what attention of diffusers runs
    return hasattr(value, "__dict__") and not hasattr(value, "__code__") and _same_object(value, other)


def _same_object(value: Any, other: Any) -> bool:
    """Return whether two objects of a class outside of torch have equal attributes, and no slots."""
    cls = type(value)
    is_plain = not isinstance(value, (nn.Module, torch.Tensor, type)) and cls.__module__.split(".")[0] != "torch"
    return is_plain and not hasattr(cls, "__slots__") and _same_value(vars(value), vars(other), 0)


def _same_form(tensor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if tensor is None or other is None:
        return tensor is other
    is_alike = (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride()) == (
        other.shape,
        other.dtype,
        other.device,
        other.requires_grad,
        other.stride(),
    )
    has_hooks = any(owner._backward_hooks or owner._post_accumulate_grad_hooks for owner in (tensor, other))
    return is_alike and type(tensor) is type(other) and tensor is not other and not has_hooks


def _same_numbers(tensor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if tensor is None or other is None or tensor.is_meta:
        return True
    return torch.equal(tensor, other)


@contextmanager
def few_layers(runs: Sequence[LayerRun]) -> Iterator[None]:
    """A context in which the lists of a model have of their runs the first `KEPT` units alone."""
    contents = [dict(run.layers._modules) for run in runs]
    try:
        for run in runs:
            layers = list(run.layers._modules.values())
            kept = [*layers[: run.template.stop], *layers[run.left_out.stop :]]
            run.layers._modules.clear()
            run.layers._modules.update({str(number): layer for number, layer in enumerate(kept)})
        yield
    finally:
        for run, modules in zip(runs, contents, strict=True):
            run.layers._modules.clear()
            run.layers._modules.update(modules)


# ---- names -----------------------------------------------------------------------------------------------------------


class LayerNames:
    """The names of a model of few layers, in the whole model."""

    def __init__(self, runs: Sequence[LayerRun]) -> None:
        self._runs = runs

    def whole(self, name: str) -> str:
        """The name of a module, a tensor or a call that is not left out: those after a run count on."""
        for run in self._runs:
            rest = _rest(name, run.name)
            if rest is None:
                continue
            number, _, after = _split(rest)
            if number is not None and number >= run.template.stop:
                return f"{run.name}.{number + len(run.left_out)}{after}"
        return name

    def of_layer(self, name: str, runs: Mapping[str, LayerRun], index: int) -> str:
        """The name in a unit that is ``index`` later, for one in the template of a run or in the unit before it.

        Args:
            runs: the runs that are meant, by their names.
        """
        for run in runs.values():
            rest = _rest(name, run.name)
            number, _, after = _split(rest) if rest is not None else (None, "", "")
            if number is not None and run.template.start - run.period <= number < run.template.stop:
                return f"{run.name}.{number + index * run.period}{after}"
        return self.whole(name)

    def is_in_template(self, name: str, runs: Mapping[str, LayerRun]) -> bool:
        """Return whether a module, a tensor or a call is in the template of one of these runs."""
        layer = self.run_of(name)
        return layer is not None and layer[0].name in runs and layer[1] in layer[0].template

    def run_of(self, name: str) -> tuple[LayerRun, int] | None:
        """The run that a module or a tensor is in, and the index of its layer in the model of few layers."""
        for run in self._runs:
            rest = _rest(name, run.name)
            number = _split(rest)[0] if rest is not None else None
            if number is not None and run.start <= number < run.template.stop:
                return run, number
        return None


def _rest(name: str, owner: str) -> str | None:
    return name[len(owner) + 1 :] if name.startswith(f"{owner}.") else None


def _split(rest: str) -> tuple[int | None, str, str]:
    """``12``, and ``.attention.weight``: a number at the beginning of a name, and what follows."""
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    after = rest[len(digits) :]
    return (int(digits), digits, after) if digits and after[:1] in ("", ".", "@", " ") else (None, "", rest)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Operations of the kept units of runs that are called in turns: those of each unit, and what follows it.

    Attributes:
        runs: the runs, by their names; zipped lists have several.
        starts: where the operations of each kept unit begin.
        length: how many operations the template has.
    """

    runs: Mapping[str, LayerRun]
    starts: tuple[int, ...]
    length: int

    @property
    def template(self) -> range:
        return range(self.starts[-1], self.starts[-1] + self.length)

    @property
    def before(self) -> range:
        """The operations of the unit before the template."""
        return range(self.starts[-2], self.starts[-1])

    @property
    def left_out(self) -> int:
        """How many units are left out."""
        return next(iter(self.runs.values())).units - KEPT


def blocks_of(runs: Sequence[LayerRun], starts: Mapping[tuple[str, int], list[int]]) -> list[Block]:
    """Return the blocks of runs, in the order in which they run.

    Args:
        starts: the name of a list and the index of a layer → where its operations begin, for each call.

    Raises:
        NotRepeatedError: a layer is called several times or never, or the layers have other numbers of operations.
    """
    by_run: dict[str, tuple[int, ...]] = {}
    for run in runs:
        calls = [starts.get((run.name, index), []) for index in range(run.start, run.template.stop)]
        if any(len(call_starts) != 1 for call_starts in calls):
            raise NotRepeatedError
        by_run[run.name] = tuple(call_starts[0] for call_starts in calls[:: run.period])
    blocks: list[Block] = []
    for run in sorted(runs, key=lambda run: by_run[run.name]):
        places = by_run[run.name]
        if list(places) != sorted(set(places)):
            raise NotRepeatedError
        previous = blocks[-1] if blocks else None
        length = places[-1] - places[-2]
        if previous is not None and places[0] < previous.template.stop:
            first = next(iter(previous.runs.values()))
            is_beside = all(a < b for a, b in zip(previous.starts, places, strict=True)) and length == previous.length
            if not is_beside or places[-1] >= previous.template.stop or run.units != first.units:
                raise NotRepeatedError
            blocks[-1] = replace(previous, runs={**previous.runs, run.name: run})
        else:
            blocks.append(Block({run.name: run}, places, length))
    return blocks


# ---- operations ------------------------------------------------------------------------------------------------------


Recorded = tuple[Operations, Mapping[str, list[int]]]


def are_repeated(few: Recorded, whole: Recorded, runs: Sequence[LayerRun]) -> bool:
    """Return whether a model runs the operations of its few layers again in the others, on the corresponding values.

    Args:
        few, whole: the operations of the model with few layers and of the whole model, and where their layers begin, by
            their names.
    """
    names = LayerNames(runs)
    operations, starts = few
    try:
        blocks = blocks_of(
            runs,
            {
                (run.name, index): starts.get(run.prefix(index), [])
                for run in runs
                for index in range(run.start, run.template.stop)
            },
        )
    except NotRepeatedError:
        return False
    # For each operation of the whole model: the one of few layers, its block, and how many layers it is later.
    places: list[tuple[int, Block | None, int]] = []
    first: dict[int, int] = {}  # operation of few layers → the first operation of the whole model that it stands for
    last: dict[int, int] = {}
    at = 0
    for block in blocks:
        if block.template.stop > len(operations) - 1 or len(block.before) != block.length:
            return False
        places += [(number, None, 0) for number in range(at, block.starts[-1])]
        for index in range(block.left_out + 1):
            places += [(number, block, index) for number in block.template]
        at = block.template.stop
    places += [(number, None, 0) for number in range(at, len(operations))]
    for number, (operation, _, _) in enumerate(places):
        first.setdefault(operation, number)
        last[operation] = number
    whole_operations = whole[0]
    if len(places) != len(whole_operations):
        return False

    def expected(value: Any, block: Block | None, index: int) -> Any:
        """What stands in the whole model for a part of the description of an operation."""
        if isinstance(value, Result):
            made_by = value.operation
            if block is not None and made_by in block.template:
                return value._replace(operation=first[made_by] + index * block.length)
            if block is not None and made_by in block.before:
                shifted = first[made_by] if not index else first[made_by + block.length] + (index - 1) * block.length
                return value._replace(operation=shifted)
            return value._replace(operation=last[made_by])
        if isinstance(value, str):
            return names.of_layer(value, block.runs, index) if block is not None else names.whole(value)
        if isinstance(value, (torch.Size, torch.dtype)) or value is None:
            return value
        if isinstance(value, tuple):
            return tuple(expected(part, block, index) for part in value)
        if isinstance(value, dict):
            return {name: expected(part, block, index) for name, part in value.items()}
        if isinstance(value, list):
            return [expected(part, block, index) for part in value]
        return value

    return all(
        operations[operation][0] == whole_operations[number][0]
        and expected(operations[operation][1], block, index) == whole_operations[number][1]
        for number, (operation, block, index) in enumerate(places)
    )


# ---- graph -----------------------------------------------------------------------------------------------------------


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
            whole = names.whole(fqn)
            state[whole] = replace(entry, fqn=whole, canonical=names.whole(entry.canonical))
            tensors[whole] = captured.tensors[fqn]
    run_passes(captured.graph, [lambda graph: _Extension(captured, runs, names).run()], state)
    lines = captured.lines and _lines(captured.lines, names)
    return replace(captured, state=state, tensors=tensors, modules=modules_of(model), lines=lines)


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
        inside = {self._nodes[at] for block in blocks for at in (*block.before, *block.template)}
        for node in self._graph.nodes:  # what every layer reads
            for block in blocks:
                if node not in inside and (node.op != "get_attr" or self._names.run_of(str(node.target)) is None):
                    self._repeat_places(node, block)
        metadata = {node: dict(node.meta) for node in inside}
        for node in self._graph.nodes:
            self._rename(node, {}, 0)
        for block in blocks:
            self._extend(block, metadata)

    def _check(self, block: Block, position: Mapping[fx.Node, int]) -> None:
        """Check that the template is the layer before it, one later. Raises NotRepeatedError."""
        if block.template.stop > len(self._nodes) or len(block.before) != block.length:
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
        for at in block.before:
            if any(position.get(user, len(position)) >= block.template.stop for user in self._nodes[at].users):
                raise NotRepeatedError  # what follows the layers reads more than the last one

    def _corresponds(self, block: Block, leaf: Any, twin: Any, position: Mapping[fx.Node, int]) -> bool:
        if not isinstance(leaf, fx.Node) or not isinstance(twin, fx.Node):
            return type(leaf) is type(twin) and bool(leaf == twin)
        if leaf.op == "get_attr":
            name, twin_name = str(leaf.target), str(twin.target)
            layer = self._names.run_of(name)
            if layer is None or layer[0].name not in block.runs:
                return leaf is twin
            run, index = layer
            after = name[len(run.prefix(index)) :]
            twin_layer = run.prefix(index - run.period)
            return twin.op == "get_attr" and index in run.template and twin_name == f"{twin_layer}{after}"
        at, twin_at = position.get(leaf, -1), position.get(twin, -1)
        if at in block.template:
            return twin_at == at - block.length
        if at in block.before:
            return block.starts[-3] <= twin_at < block.starts[-2]
        return leaf is twin

    # ---- copies ------------------------------------------------------------------------------------------------------

    def _extend(self, block: Block, metadata: Mapping[fx.Node, dict[str, Any]]) -> None:
        """Insert the operations of the layers of a block that are left out, and let what follows read the last one.

        Args:
            metadata: of the nodes of the block, with the names of the model of few layers.
        """
        template = [self._nodes[at] for at in block.template]
        before = dict(zip((self._nodes[at] for at in block.before), template, strict=True))
        layer_before = {node: twin for twin, node in before.items()}
        state = self._state_groups(block)
        outside = {node: [user for user in node.users if user not in layer_before] for node in template}
        last, last_state = template[-1], [group[-1] for group in state]
        copies: dict[fx.Node, fx.Node] = {node: node for node in template}
        for index in range(1, block.left_out + 1):
            values: dict[fx.Node, fx.Node] = {node: copies[twin] for node, twin in before.items()}
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
                    last.meta = dict(metadata[layer_before[node]])
                    self._rename(last, block.runs, index + 1)
                if (owner := node.meta.get("writes")) is not None:
                    names = {value.name: copy.name for value, copy in values.items()}
                    last.meta["writes"] = names.get(owner, owner)
        for node in template:
            owner = node.meta.get("writes")
            node.meta = dict(metadata[layer_before[node]])
            self._rename(node, block.runs, 1)
            if owner is not None:
                node.meta["writes"] = owner
        for node, users in outside.items():
            for user in users:
                user.replace_input_with(node, copies[node])

    def _state_groups(self, block: Block) -> list[list[fx.Node]]:
        """The tensors of the template that a graph has one after the other: parameters, and behind those of all layers
        buffers."""
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

    def _copy_state(self, node: fx.Node, block: Block, index: int) -> fx.Node:
        target = self._names.of_layer(str(node.target), block.runs, index)
        copy = self._graph.create_node("get_attr", target, name=node.name)
        copy.meta = dict(node.meta)
        self._rename(copy, block.runs, index)
        return copy

    # ---- names -------------------------------------------------------------------------------------------------------

    def _repeat_places(self, node: fx.Node, block: Block) -> None:
        """Let what a node says of calls in the template hold for the layers that are left out as well."""
        for key in _BY_CALL:
            items = list(node.meta.get(key, {}).items())
            own = [at for at, (call, _) in enumerate(items) if self._names.is_in_template(call, block.runs)]
            if own:
                more = [
                    (self._names.of_layer(call, block.runs, index), places)
                    for index in range(1, block.left_out + 1)
                    for call, places in (items[at] for at in own)
                ]
                node.meta[key] = dict(items[: own[-1] + 1]) | {_LEFT_OUT + call: places for call, places in more}
                node.meta[key] |= dict(items[own[-1] + 1 :])

    def _rename(self, node: fx.Node, runs: Mapping[str, LayerRun], index: int) -> None:
        """Give what a node says of calls the names of a layer.

        Args:
            runs: the runs of the layer; none for a node that is not left out.
            index: how many layers later it is.
        """

        def name_of(name: str) -> str:
            if name.startswith(_LEFT_OUT):  # it has its name in the whole model
                return name.removeprefix(_LEFT_OUT)
            return self._names.of_layer(name, runs, index) if runs else self._names.whole(name)

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
        later = self._names.of_layer(name, runs, index)
        return call[: len(call) - len(name)] + later, self._names.of_layer(fqn, runs, index)

    @staticmethod
    def _function(run: FunctionRun, call: str) -> FunctionRun:
        return run if run.call == call else replace(run, call=call)


def _value(values: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return values.get(node, node)


def _lines(lines: ExecutedLines, names: LayerNames) -> ExecutedLines:
    """The lines that ran, of all layers."""
    return ExecutedLines(
        _of_all_layers(lines.modules, names), lines.functions, _of_all_layers(lines.none_variables, names)
    )


def _of_all_layers(by_name: Mapping[str, _T], names: LayerNames) -> dict[str, _T]:
    """What holds of modules, by their names, with those of the layers that are left out."""
    all_names: dict[str, _T] = {}
    for fqn, value in by_name.items():
        all_names[names.whole(fqn)] = value
        layer = names.run_of(fqn)
        if layer is not None and layer[1] in layer[0].template:
            run = layer[0]
            for index in range(1, run.units - KEPT + 1):
                all_names[names.of_layer(fqn, {run.name: run}, index)] = value
    return all_names
