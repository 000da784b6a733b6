"""From an exported program to one flat graph: state by name, regions inlined."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from pipegraph.errors import CaptureError
from pipegraph.graph.calls import OBJECT, FunctionRun, PlainValue, copy_places, functions_of
from pipegraph.graph.captured import PIPE_SPLITS, STRUCTURE, VALUE, StateEntry
from pipegraph.graph.export.dynamic_shapes import USUAL_NAMES, SizeNames
from pipegraph.graph.export.fractions import is_exact
from pipegraph.graph.export.input_sizes import FixedSizeNeededError, InputSizes, is_symbolic
from pipegraph.graph.export.kept_sizes import OF_ATEN
from pipegraph.graph.model_structure import MODULE_ATTRIBUTES
from pipegraph.graph.nodes import number_of, source_line
from pipegraph.graph.operators import operator_of
from pipegraph.graph.tensor_hooks import place_hooks
from pipegraph.torch_private.export import GRAD_ENABLED
from pipegraph.torch_private.fake_tensors import fake_mode_of, values_of
from pipegraph.torch_private.operators import HigherOrderOperator, OpOverload

aten = torch.ops.aten

_NO_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"
_PIPE_SPLIT = "pippy._pipe_split.default"
# The line of a constant that the model's code makes and gives a name.
_ASSIGNED = re.compile(r": (\w+) = torch\.(?:tensor|as_tensor|\w*Tensor)\(")

_NAMELESS = "constant"
# A longer list of indices is a table.
_LONGEST_LIST = 8


class _Unwritable(NamedTuple):
    """In the place of a number that only checks may read: a truth value or a fraction that depends on sizes."""

    error: FixedSizeNeededError


def flatten(
    exported: ExportedProgram,
    state: dict[str, StateEntry],
    tensors: dict[str, torch.Tensor],
    names: SizeNames = USUAL_NAMES,
) -> tuple[fx.Graph, InputSizes]:
    """exported(state…, inputs…) → graph(inputs…) with ``get_attr`` nodes for state, and the dynamic sizes.

    ``no_grad`` and ``autocast`` blocks, which export keeps as graphs of their own, are inlined; their nodes carry the
    block in ``meta["regions"]``. Constants that the model's code made are added to ``state`` and ``tensors`` under the
    name of the module that reads them, unless they are there from the graph of another mode.

    Symbolic sizes become numbers, in shapes (``meta["sizes"]`` keeps the `SymbolicSize`s) and in arguments. What
    computes them is left out.

    Args:
        names: of sizes of inputs.

    Raises:
        CaptureError: the graph holds what a stage's source cannot: a custom object, control flow, an unknown shape.
        FixedSizeNeededError: something other than a whole number is computed from dynamic sizes.
    """
    return _Flattening(exported, state, tensors, InputSizes(exported, names)).run()


class _Flattening:
    """One use of `flatten`: ``graph`` is what has been made, ``state_nodes`` the node of each tensor of the state,
    ``functions`` the calls of functions by their keys."""

    def __init__(
        self,
        exported: ExportedProgram,
        state: dict[str, StateEntry],
        tensors: dict[str, torch.Tensor],
        sizes: InputSizes,
    ) -> None:
        self.exported = exported
        self.state = state
        self.tensors = tensors
        self.graph = fx.Graph()
        self.state_nodes: dict[str, fx.Node] = {}
        self.sizes = sizes
        self.pipe_splits: tuple[str, ...] = ()
        self.functions: dict[str, FunctionRun] = {}
        self.called = {
            fqn
            for node in exported.graph_module.graph.nodes
            for fqn, _ in node.meta.get("nn_module_stack", {}).values()
        }

    def run(self) -> tuple[fx.Graph, InputSizes]:
        module = self.exported.graph_module
        specs = {spec.arg.name: spec for spec in self.exported.graph_signature.input_specs}
        inputs = module.graph.find_nodes(op="placeholder")
        values: dict[fx.Node, Any] = {node: self._placeholder(node, specs[node.name]) for node in inputs}
        self._inline(module, values, regions=())
        place_hooks(self.graph)
        return self.graph, self.sizes

    def _placeholder(self, node: fx.Node, spec: InputSpec) -> Any:
        if spec.kind is InputKind.USER_INPUT:
            if not isinstance(node.meta.get("val"), torch.Tensor):
                return node.meta.get("val")
            placed = self.graph.placeholder(node.name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            assert spec.target is not None
            placed = self._get_attr(node, self.state[spec.target].canonical)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            placed = self._get_attr(node, self._constant(node, spec.target))
            tensor = self.exported.constants[spec.target]
            if "lifted" in spec.target and not tensor.is_meta:
                _keep_numbers(placed, tensor)
        else:
            if isinstance(self.exported.constants.get(spec.target or ""), torch.Generator):
                raise CaptureError(
                    "The model draws from its own torch.Generator, and a stage would not have its state.\n"
                    f"  at {source_line(next(iter(node.users), node))}",
                    "without generator=, and Pipeline(seed=...), with which random numbers follow from the step.",
                )
            raise CaptureError(
                f"The model uses {spec.target or node.name}, a {spec.kind.name.lower()} that a stage's source cannot "
                "hold.",
                "keep tensors, numbers and modules in the model, and build other objects inside forward.",
            )
        placed.meta |= self.sizes.describe(node.meta["val"])
        copy_places(node, placed)
        return placed

    def _get_attr(self, node: fx.Node, fqn: str) -> fx.Node:
        """One node per tensor. Not ``Graph.get_attr``, which wants an owning module and warns without one."""
        if fqn not in self.state_nodes:
            self.state_nodes[fqn] = self.graph.create_node("get_attr", fqn, name=node.name)
            self.state_nodes[fqn].meta |= {"kind": self.state[fqn].kind, "requires_grad": self.state[fqn].requires_grad}
        return self.state_nodes[fqn]

    def _constant(self, node: fx.Node, target: str) -> str:
        """Name a constant after the module that first reads it, so that equal layers hold equally named constants."""
        reader = next(iter(node.users), None)
        tensor = self.exported.constants[target]
        if fake_mode_of(tensor) is not None:
            raise CaptureError(
                "The model takes the data of a tensor that it computes, which torch.export cannot follow.\n"
                f"  at {source_line(reader) if reader is not None else target}",
                "x.detach() instead of x.data.",
            )
        owner, _, name = target.rpartition(".")
        if "lifted" in target:  # a name that export made up
            assigned = _ASSIGNED.search(source_line(reader)) if reader is not None else None
            name = assigned[1] if assigned else _NAMELESS
        if "lifted" in target or not owner:
            stack = list(reader.meta.get("nn_module_stack", {}).values()) if reader is not None else []
            owner = stack[-1][0] if stack else ""
        name = f"{name}_" if name in MODULE_ATTRIBUTES else name  # no buffer can have such a name
        first = f"{owner}.{name}" if owner else name
        fqn, count = first, 0
        while fqn in self.state or fqn in self.called:
            if (
                fqn in self.state
                and fqn not in self.state_nodes
                and _is_same_constant(self.state[fqn], self.tensors[fqn], tensor)
            ):
                return fqn  # the graph of another mode has it
            count += 1
            fqn = f"{first}_{count}"
        self.tensors[fqn] = tensor.detach()
        self.state[fqn] = StateEntry.constant(fqn, tensor)
        return fqn

    def _inline(self, module: fx.GraphModule, values: dict[fx.Node, Any], regions: tuple[Any, ...]) -> Any:
        """Append the operations of ``module`` to the graph; return the values of its output."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                result = fx.map_arg(node.args[0], lambda arg: values[arg])
                if not regions:
                    self.graph.output(result).meta[STRUCTURE] = self.exported.call_spec.out_spec
                return result
            if node.op == "get_attr":
                values[node] = getattr(module, str(node.target))
            elif str(node.target) == _PIPE_SPLIT:
                self.pipe_splits = (*self.pipe_splits, source_line(node))
            elif node.target is operator.getitem and isinstance(values[node.args[0]], (tuple, list)):
                values[node] = values[node.args[0]][node.args[1]]
            elif _is_region(node):
                values[node] = self._region(node, values, regions)
            elif isinstance(node.meta.get("val"), torch.SymInt):
                if not is_exact(node):
                    error = self.sizes.fixed_size_needed(node.meta["val"])
                    error.line = source_line(node)
                    raise error
                values[node] = self._describe_value(node, self.sizes.number)
            elif is_symbolic(node.meta.get("val")) and (number := self.sizes.constant(node.meta["val"])) is not None:
                values[node] = number
            elif is_symbolic(node.meta.get("val")):
                error = self.sizes.fixed_size_needed(node.meta["val"])
                error.line = source_line(node)
                values[node] = _Unwritable(error)
            elif not _checks_size(node):
                values[node] = self._operation(node, values, regions)
        raise AssertionError("an exported graph has an output node")

    def _region(self, node: fx.Node, values: dict[fx.Node, Any], regions: tuple[Any, ...]) -> Any:
        name = node.target.name()  # type: ignore[union-attr]
        settings = tuple(node.args[: 1 if name == _NO_GRAD else 4])
        body_node, *arguments = node.args[len(settings) :]
        body = values[body_node]  # type: ignore[index]
        passed = [values[arg] if isinstance(arg, fx.Node) else arg for arg in arguments]
        inputs = dict(zip(body.graph.find_nodes(op="placeholder"), passed, strict=True))
        region = ("grad" if name == _NO_GRAD else "autocast", settings)
        return self._inline(body, {**values, **inputs}, (*regions, region))

    def _learn_sizes(self, node: fx.Node) -> None:
        """Learn from a reshape, or from a range in steps of 1 or −1, what the sizes of its result are."""
        arguments: tuple[Any, ...] = node.args
        if node.target in (aten.view.default, aten.reshape.default):
            self.sizes.learn(node.meta["val"].shape, arguments[1])
        elif node.target is aten.unflatten.int:
            tensor, dim, sizes = arguments
            self.sizes.learn(node.meta["val"].shape[dim % tensor.meta["val"].dim() :], sizes)
        elif node.target is aten.arange.start_step and arguments[2:3] in ((1,), (-1,)):
            start, end = (
                self.sizes.expression(arg.meta["val"] if isinstance(arg, fx.Node) else arg) for arg in arguments[:2]
            )
            if start.is_integer and end.is_integer:
                self.sizes.learn_equal(node.meta["val"].shape[0], (end - start) * int(arguments[2]))

    def _describe_value(self, node: fx.Node, describe: Callable[[Any], Any]) -> Any:
        """What ``describe`` returns for the value of a node."""
        try:
            return describe(node.meta.get("val"))
        except FixedSizeNeededError as error:
            error.line = source_line(node)
            if self.sizes.vary:
                raise
            raise CaptureError(
                f"The model makes a tensor whose shape depends on values ({node.target}).\n  at {source_line(node)}",
                "keep the shape and mask the values, with torch.where or a multiplication.",
            ) from error

    def _operation(self, node: fx.Node, values: dict[fx.Node, Any], regions: tuple[Any, ...]) -> fx.Node:
        if not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
            raise CaptureError(_unsupported(node))
        for parent in node.all_input_nodes:
            if isinstance(values[parent], _Unwritable):
                raise values[parent].error
        self._learn_sizes(node)
        enabled = node.meta.get(GRAD_ENABLED, True)
        if enabled != next((settings[0] for kind, settings in reversed(regions) if kind == "grad"), True):
            regions = (*regions, ("grad", (enabled,)))
        placed = self.graph.node_copy(node, lambda arg: values[arg])
        placed.target = OF_ATEN.get(placed.target, placed.target)
        stack = list(node.meta.get("nn_module_stack", {}).items())
        placed.meta = {
            **self._describe_value(node, self.sizes.describe),
            "path": tuple((call, fqn) for call, (fqn, _) in stack if fqn),
            "functions": tuple(map(self._with_sizes, functions_of(node))),
            "regions": regions,
            "in_every_mode": False,
            "stack_trace": node.meta.get("stack_trace") or "",
            PIPE_SPLITS: self.pipe_splits,
        }
        copy_places(node, placed)
        return placed

    def _with_sizes(self, run: FunctionRun) -> FunctionRun:
        """A call of a function with the sizes among its arguments as those of the graph."""
        if run.key not in self.functions:

            def with_sizes(form: object) -> object:
                if isinstance(form, PlainValue):
                    try:
                        return PlainValue(self.sizes.number(form.value)) if is_symbolic(form.value) else form
                    except FixedSizeNeededError:
                        return OBJECT
                return tuple(map(with_sizes, form)) if isinstance(form, tuple) else form

            arguments = tuple((name, with_sizes(form)) for name, form in run.arguments)
            self.functions[run.key] = replace(run, arguments=arguments)
        return self.functions[run.key]


def _unsupported(node: fx.Node) -> str:
    """The message for a call in the graph that is not an operator of torch."""
    at = f"\n  at {line}" if (line := source_line(node)) else ""
    if getattr(node.target, "__module__", "").startswith("torch._functorch"):
        return (
            f"The model uses torch.vmap or another function of torch.func, which cannot be written as a stage.{at}\n"
            "Try: write the operations for the whole batch."
        )
    return (
        f"The model uses {node.target}, a control-flow or custom operator that cannot be written as a stage.{at}\n"
        "Try: replace it by plain tensor operations (torch.where for torch.cond)."
    )


def _keep_numbers(node: fx.Node, tensor: torch.Tensor) -> None:
    """Note the number of a constant, or those of a short list without a name: ``x[:, [1, 0]]``."""
    if tensor.numel() == 1 and not tensor.is_complex():
        node.meta[VALUE] = number_of(tensor)
    elif tensor.dim() == 1 and tensor.numel() <= _LONGEST_LIST and tensor.dtype == torch.int64:
        is_nameless = re.fullmatch(rf"{_NAMELESS}(_\d+)?", str(node.target).rpartition(".")[2])
        node.meta |= {VALUE: tensor.tolist()} if is_nameless else {}


def _checks_size(node: fx.Node) -> bool:
    """Return whether an operation checks numbers, which the exported graph takes from the shapes of inputs."""
    return operator_of(node).check and not any(
        isinstance(parent.meta.get("val"), torch.Tensor) for parent in node.all_input_nodes
    )


def _is_same_constant(entry: StateEntry, state_tensor: torch.Tensor, tensor: torch.Tensor) -> bool:
    is_alike = entry.kind == "constant" and entry.shape == tuple(tensor.shape) and entry.dtype == tensor.dtype
    return is_alike and values_of(state_tensor) == values_of(tensor)


def _is_region(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, HigherOrderOperator) and target.name() in (_NO_GRAD, _AUTOCAST)
