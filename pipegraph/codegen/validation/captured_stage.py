"""Run the captured operations of a stage on fake tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipegraph.codegen.validation.recorder import TermRecorder
from pipegraph.codegen.validation.repeated_calls import SMALLEST, RepeatedCalls
from pipegraph.codegen.validation.settings import Setting
from pipegraph.codegen.validation.terms import Key
from pipegraph.graph.aliasing import written_by
from pipegraph.graph.calls import CallTree, StageMembers, call_tree
from pipegraph.graph.captured import BRANCH, Captured, by_mode, model_dtype, model_number
from pipegraph.graph.nodes import path_of
from pipegraph.graph.partition.stages import StageGraph
from pipegraph.torch_private.operators import OpOverload, schema_arguments
from pipegraph.torch_private.pytrees import pytree


@dataclass(frozen=True)
class StageResult:
    """The terms that a run of a stage leaves.

    Attributes:
        outputs: of its results; None for one that the mode does not make.
        buffers: of its buffers, by their first names.
    """

    outputs: tuple[int | None, ...]
    buffers: Mapping[str, int]

    def terms(self) -> list[int]:
        """All terms of it."""
        return [*(term for term in self.outputs if term is not None), *self.buffers.values()]

    @classmethod
    def read(cls, recorder: TermRecorder, outputs: Sequence[Any], tensors: Mapping[str, Tensor]) -> StageResult:
        """The terms of outputs, and of all tensors that are no parameters."""
        return cls(
            tuple(recorder.term_of(output) if isinstance(output, Tensor) else None for output in outputs),
            {
                name: recorder.term_of(tensor)
                for name, tensor in tensors.items()
                if not isinstance(tensor, nn.Parameter)
            },
        )


def stage_inputs(stage: StageGraph, setting: Setting, recorder: TermRecorder) -> list[Tensor]:
    """Fake tensors for what a stage takes."""
    tensors = []
    for node in stage.inputs:
        tensor = setting.fake(node)
        tensor.requires_grad_(node.op != "placeholder" and bool(node.meta["requires_grad"]))
        recorder.name(tensor, _leaf("input", node.name, tensor), tensor.requires_grad)
        tensors.append(tensor)
    return tensors


@dataclass(frozen=True)
class StageState:
    """Fake tensors for the parameters, buffers and constants of a stage, by their first names.

    One may be used in several runs: what a run writes into it is known to the recorder alone.
    """

    captured: Captured
    tensors: Mapping[str, Tensor]

    @classmethod
    def create(cls, captured: Captured, stage: StageGraph, setting: Setting) -> StageState:
        """The state of a stage, in the dtypes of a setting."""
        nodes = {str(node.target): node for node in captured.graph.find_nodes(op="get_attr")}
        tensors: dict[str, Tensor] = {}
        for name in dict.fromkeys(captured.state[fqn].canonical for fqn in stage.state):
            entry, node = captured.state[name], nodes.get(name)
            tensor = setting.fake(node) if node is not None else torch.empty(entry.shape, dtype=entry.dtype)
            if entry.kind == "parameter":
                tensor = nn.Parameter(tensor, requires_grad=entry.requires_grad)
            tensors[name] = tensor
        return cls(captured, tensors)

    def name(self, recorder: TermRecorder) -> None:
        """Give the tensors their terms."""
        for name, tensor in self.tensors.items():
            recorder.name(tensor, _leaf(self.captured.state[name].kind, name, tensor), tensor.requires_grad)


def _leaf(kind: str, name: str, tensor: Tensor) -> Key:
    return Key(kind, (name,), tuple(tensor.shape), str(tensor.dtype))


@dataclass
class CapturedStage:
    """The captured operations of one stage, to be run in one setting.

    Args:
        calls: the calls that were run before, in this setting; None runs all.

    Attributes:
        node: the operation that runs.
        values: of the operations that ran, the inputs and the state.
    """

    captured: Captured
    stage: StageGraph
    state: StageState
    setting: Setting
    recorder: TermRecorder
    calls: RepeatedCalls | None
    node: fx.Node | None = None
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def run(self) -> StageResult:
        """Run the stage."""
        self.values |= zip(self.stage.inputs, stage_inputs(self.stage, self.setting, self.recorder), strict=True)
        self.state.name(self.recorder)
        tensors = self.state.tensors
        nodes = {str(node.target): node for node in self.captured.graph.find_nodes(op="get_attr")}
        self.values |= {nodes[name]: tensor for name, tensor in tensors.items() if name in nodes}
        self._members = StageMembers(self.stage.nodes, self.stage.outputs, self.stage.state)
        self._run_call(call_tree(self.stage.nodes))
        return StageResult.read(self.recorder, [self.values.get(node) for node in self.stage.outputs], tensors)

    def _run_call(self, tree: CallTree) -> None:
        for item in tree.items:
            if isinstance(item, fx.Node):
                self._run_operation(item)
            elif self.calls is None or not self._run_repeated(item):
                self._run_call(item)

    def _run_repeated(self, tree: CallTree) -> bool:
        """Run a call, or make the terms of an equal one again; return whether that is possible."""
        nodes = [node for node in tree.nodes() if self._runs(node)]
        if len(nodes) < SMALLEST or any("writes" in node.meta for node in nodes):
            return False
        inner = set(nodes)
        parents = dict.fromkeys(parent for node in nodes for parent in node.all_input_nodes)
        reads = [node for node in parents if node not in inner]
        arguments = [self.values[node] for node in reads if node in self.values]
        makes = [node for node in nodes if self._members.read_outside(node, inner)]
        if len(arguments) < len(reads) or not all(isinstance(argument, Tensor) for argument in arguments):
            return False
        if not makes or not all(isinstance(node.meta.get("val"), Tensor) for node in makes):
            return False
        code = self._code(nodes, reads, makes)

        def call() -> list[Tensor]:
            self._run_call(tree)
            return [self.values[node] for node in makes]

        assert self.calls is not None
        results = self.calls.run(self.recorder, code, arguments, call)
        self.values |= zip(makes, results, strict=True)
        return True

    def _code(self, nodes: Sequence[fx.Node], reads: Sequence[fx.Node], makes: Sequence[fx.Node]) -> Hashable:
        """What two calls have alike that compute the same of what they read."""
        places: dict[fx.Node, Hashable] = {node: ("read", place) for place, node in enumerate(reads)}
        places |= {node: ("operation", place) for place, node in enumerate(nodes)}
        operations = []
        for node in nodes:
            arguments = pytree.tree_map(
                lambda leaf: places[leaf] if isinstance(leaf, fx.Node) else (type(leaf), self.setting.number(leaf)),
                _arguments(self, node),
                is_leaf=lambda leaf: isinstance(leaf, fx.Node),
            )
            operations.append((node.target, repr(arguments), tuple(node.meta.get("regions", ()))))
        return tuple(operations), tuple(places[node] for node in makes)

    def _runs(self, node: fx.Node) -> bool:
        """Return whether the mode runs an operation."""
        part = node.meta.get(BRANCH)
        return part is None or part.training in (None, self.setting.training)

    def _run_operation(self, node: fx.Node) -> None:
        if not self._runs(node):
            target = next(iter(written_by(node)), None)
            if target in self.values:  # what reads the write reads the memory as it was, in the other mode
                self.values[node] = self.values[target]
            return
        self.node = node
        if node.target is by_mode:
            self.values[node] = self.values[node.args[0 if self.setting.training else 1]]  # type: ignore[index]
        elif self._leaves_count(node):
            self.values[node] = self.values[node.args[0]]  # type: ignore[index]
        else:
            args, kwargs = fx.map_arg(_arguments(self, node), self.values.__getitem__)
            args, kwargs = pytree.tree_map(self.setting.number, (args, kwargs))
            with _regions(node):
                self.values[node] = self._computed(node, args, kwargs)

    def _computed(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        target: Any = node.target
        if target is model_dtype:
            return args[1 if self.setting.is_converted else 0]
        if target is model_number:
            captured_dtype, converted_dtype, limit = args
            return float(getattr(torch.finfo(converted_dtype if self.setting.is_converted else captured_dtype), limit))
        return target(*args, **kwargs)

    def _leaves_count(self, node: fx.Node) -> bool:
        """Return whether it counts the batches of a batch norm that is in evaluation mode, which leaves the count."""
        target = node.args[0] if "writes" in node.meta else None
        if not isinstance(target, fx.Node) or target.op != "get_attr":
            return False
        owner, _, name = str(target.target).rpartition(".")
        return name == "num_batches_tracked" and not self.mode_of(owner)

    def mode_of(self, fqn: str) -> bool:
        """Return whether a module is in training mode."""
        return self.captured.modules[fqn].modes[0 if self.setting.training else 1]


def _arguments(stage: CapturedStage, node: fx.Node) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of an operation, with the flags that follow the mode of the module around it."""
    if not isinstance(node.target, OpOverload) or node.meta["in_every_mode"]:
        return node.args, node.kwargs
    names = [argument.name for argument in schema_arguments(node.target)]
    flags = [name for name in names if name in ("train", "training")]
    is_attention = node.target is torch.ops.aten.scaled_dot_product_attention.default
    if not flags and not is_attention:
        return node.args, node.kwargs
    is_training = stage.mode_of(path_of(node)[-1][1] if path_of(node) else "")
    named = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if is_attention:
        named["dropout_p"] = named.get("dropout_p", 0.0) if is_training else 0.0
    elif "running_mean" in named and named["running_mean"] is None:
        named["training"] = True  # without running statistics there is only one mode
    else:
        named |= dict.fromkeys(flags, is_training)
    return (), named


@contextmanager
def _regions(node: fx.Node) -> Iterator[None]:
    """The ``no_grad`` and ``autocast`` blocks around an operation."""
    with ExitStack() as stack:
        for kind, settings in node.meta.get("regions", ()):
            if kind == "grad":
                stack.enter_context(torch.set_grad_enabled(settings[0]))
            elif kind == "autocast":
                device, dtype, enabled, cache = settings
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield
