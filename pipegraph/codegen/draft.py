"""A package before it is written: its classes and its manifest, built from a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from msgspec import UNSET, structs
from torch import Tensor, fx

from pipegraph.codegen.classes.block_classes import BlockClasses
from pipegraph.codegen.classes.direct_calls import with_direct_calls
from pipegraph.codegen.classes.merge_classes import merge_classes
from pipegraph.codegen.classes.stage_class import stage_class
from pipegraph.codegen.classes.unused_parameters import without_unused_parameters
from pipegraph.codegen.forms import USUAL, Forms
from pipegraph.codegen.initial_values import InitialValues, initial_values
from pipegraph.codegen.names.draw_names import draw_names
from pipegraph.codegen.names.identifiers import is_plain, unused, variable
from pipegraph.codegen.names.model_names import dtype_name
from pipegraph.codegen.render import render_blocks, render_init, render_stage, render_weights
from pipegraph.codegen.syntax.statements import ClassSource, FunctionSource, functions_called
from pipegraph.codegen.weights import shard_name, shard_plan
from pipegraph.errors import CaptureError
from pipegraph.graph.batch_report import BatchReport
from pipegraph.graph.calls import RETURNED, VariablePlace
from pipegraph.graph.captured import Captured, own_recompute
from pipegraph.graph.custom_functions import NAMESPACE as FUNCTIONS
from pipegraph.graph.index_bounds import index_bound
from pipegraph.graph.nodes import keeps_dtype, label_of, shape_of
from pipegraph.graph.partition.stages import Boundary, tensor_of
from pipegraph.graph.passes.gradients import untrained_parameters
from pipegraph.graph.sources.huggingface import checkpoint_names, tp_plan_of
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.package import (
    BatchEntry,
    Buffer,
    CheckpointNames,
    Manifest,
    ModelEntry,
    PlanEntry,
    RowOperator,
    StageEntry,
    Value,
    sequences,
)
from pipegraph.package.sizes import BATCH, Size
from pipegraph.planner.plan import Plan
from pipegraph.torch_private.operators import OpOverload, defining_module
from pipegraph.torch_private.pytrees import pytree
from pipegraph.version import __version__


@dataclass(frozen=True)
class Source:
    """The source of a package.

    Attributes:
        functions, blocks: of ``blocks.py``; blocks in an order in which each can be defined.
        stages: a class for each stage.
        initial_values: the tables in ``weights.py``.
        has_checkpoint: whether a Hugging Face checkpoint may have the weights under other names, or in parts.
        has_adapters: whether such a checkpoint lacks parameters of adapters.
        libraries: namespace of operators → the module that defines them.
    """

    functions: tuple[FunctionSource, ...]
    blocks: tuple[ClassSource, ...]
    stages: tuple[ClassSource, ...]
    initial_values: InitialValues
    has_checkpoint: bool
    has_adapters: bool
    libraries: Mapping[str, str]

    def files(self, model: str) -> dict[str, str]:
        """The text of each file by its name.

        Args:
            model: the model, for docstrings: ``Llama (examples/llama.py)``.
        """
        count = f"{len(self.stages)} stages" if len(self.stages) > 1 else "one stage"
        place = "a Hugging Face checkpoint" if self.has_checkpoint else "another one"
        has_blocks = self.functions or self.blocks
        shared = (
            f"The blocks that the stages of {model} share." if has_blocks else f"The stages of {model} share no blocks."
        )
        files = {
            "__init__.py": render_init(
                self.stages, f"{model} in {count}, written by pipegraph {__version__}.", self.has_adapters
            ),
            "blocks.py": render_blocks(self.functions, self.blocks, shared, self.libraries),
            "weights.py": render_weights(
                f"Reads the tensors of a stage from this folder or from {place}, or initialises them.",
                self.initial_values,
                self.has_checkpoint,
                self.has_adapters,
            ),
        }
        for index, stage in enumerate(self.stages):
            header = f"Stage {index} of {len(self.stages)} of {model}."
            files[f"stage_{index}.py"] = render_stage(stage, self.functions, self.blocks, header, self.libraries)
        return files


@dataclass(frozen=True)
class Draft:
    """A package that is not written yet.

    Attributes:
        source: its source.
        manifest: with no digests of files.
        shapes: the shape of each value of the manifest that is a tensor, with a `SymbolicSize` for each that varies.
    """

    source: Source
    manifest: Manifest
    shapes: Mapping[str, tuple[int, ...]]


def draft(plan: Plan, weights: bool = True, source: ModelSource | None = None, forms: Forms = USUAL) -> Draft:
    """Build a package.

    Args:
        plan, weights, source: as `pipegraph.codegen.package_files.generate` takes them.
        forms: how plainly each class is written.

    Raises:
        CaptureError: an operation comes from a library that a package could not import.
    """
    captured = plan.captured
    blocks = BlockClasses(captured, forms)
    source_names = _source_names(plan, blocks)
    stages = [stage_class(plan, blocks, stage, source_names) for stage in plan.stages]
    shared, stages = merge_classes(blocks.used_by(stages), stages, forms)
    called = functions_called(node for cls in (*shared, *stages) for node in cls.walk())
    for function in reversed(blocks.functions):
        if function.name in called:
            called |= function.uses()
    functions = [function for function in blocks.functions if function.name in called]
    direct = with_direct_calls([*shared, *stages])
    shared, stages = direct[: len(shared)], direct[len(shared) :]
    functions, shared, stages = without_unused_parameters(functions, shared, stages)
    checkpoint = checkpoint_names(captured.modules[""].module)
    written = Source(
        tuple(functions),
        tuple(shared),
        tuple(stages),
        initial_values(captured, blocks.package_tensors),
        bool(checkpoint),
        "adapters" in checkpoint,
        _libraries(captured),
    )
    names = _unique(plan.boundaries, source_names, set(captured.constants))
    draws = [draw_names(captured, stage.nodes, blocks.called[stage.index]) for stage in plan.stages]
    manifest = _manifest(plan, names, draws, weights, tuple(written.libraries), source)
    return Draft(written, manifest, {name: shape_of(boundary.node) for boundary, name in names.items()})


def _manifest(
    plan: Plan,
    names: Mapping[Boundary, str],
    draws: Sequence[Mapping[str, tuple[str, ...]]],
    weights: bool,
    requires: Sequence[str],
    source: ModelSource | None,
) -> Manifest:
    captured = plan.captured
    by_label = {label_of(boundary.node): names[boundary] for boundary in plan.boundaries if boundary.producer < 0}
    by_label |= {label_of(boundary.node): names[boundary] for boundary in plan.stage_outputs(plan.stages[-1])}

    def unique_name(label: Any) -> Any:
        return by_label.get(label, label)

    sizes = _sizes(captured)
    shards = shard_plan(captured, plan.stages, weights)
    values = {names[boundary]: _value(names[boundary], boundary, sizes, captured.batch) for boundary in plan.boundaries}
    for name, constant in captured.constants.items():
        values[name] = Value(name, "", (), -1, (), constant=constant)
    untrained = untrained_parameters(captured)
    return Manifest(
        generator=f"pipegraph {__version__}",
        model=ModelEntry(
            source=source.name if source is not None else "",
            class_name=captured.model_name,
            sha256=source.sha256 if source is not None else "",
        ),
        args=pytree.tree_map(unique_name, list(captured.args)),
        kwargs=pytree.tree_map(unique_name, captured.kwargs),
        outputs=pytree.tree_map(unique_name, captured.outputs),
        evaluation_outputs=pytree.tree_map(unique_name, captured.evaluation_outputs),
        lists=tuple(_lists(captured)),
        sizes=sizes,
        conditions=captured.sizes.conditions,
        values=values,
        stages=tuple(
            StageEntry(
                index=stage.index,
                module=f"stage_{stage.index}",
                class_name=f"Stage{stage.index}",
                inputs=tuple(names[boundary] for boundary in plan.stage_inputs(stage)),
                outputs=tuple(names[boundary] for boundary in plan.stage_outputs(stage)),
                parameters=tuple(fqn for fqn in stage.state if captured.state[fqn].kind == "parameter"),
                buffers=tuple(
                    Buffer(fqn, captured.state[fqn].persistent)
                    for fqn in stage.state
                    if captured.state[fqn].kind != "parameter"
                ),
                weights=file if (file := shard_name(stage.index, len(plan.stages))) in shards else None,
                cost=cost,
                untrained=tuple(fqn for fqn in stage.state if fqn in untrained) or UNSET,
                draws=dict(draws[stage.index]) or UNSET,
            )
            for stage, cost in zip(plan.stages, plan.costs, strict=True)
        ),
        tied=captured.tied,
        plan=_plan_entry(plan),
        requires=tuple(requires),
        checkpoint=CheckpointNames(**checkpoint_names(captured.modules[""].module)),
        tp_plan=dict((source.tp_plan if source is not None else None) or tp_plan_of(captured.modules[""].module)),
        recompute=str(own_recompute(captured)),
        batch=_batch_entry(captured.batch),
    )


def _batch_entry(report: BatchReport) -> BatchEntry:
    by_design, mixing = (
        tuple(RowOperator(operator.operator, operator.line, operator.result) for operator in operators)
        for operators in (report.per_microbatch, report.mixing)
    )
    return BatchEntry(report.proof, by_design, mixing, report.suggestion, report.target_dim)


def _plan_entry(plan: Plan) -> PlanEntry:
    """The cuts and, if the plan has one, the prediction. The cost of each stage is in the entry of the stage."""
    return PlanEntry(
        points=tuple(str(point) for point in plan.points),
        stages=tuple(line.partition(": ")[2] for line in plan.describe()),
        layout=plan.layout or UNSET,
        prediction=None if plan.prediction is None else structs.replace(plan.prediction, stages=()),
    )


def _sizes(captured: Captured) -> dict[str, Size]:
    """The sizes of the model's inputs that may vary, by name. None of them may be 0."""
    limits = captured.sizes
    return {
        name: Size(captured=number, min=limits.lowest.get(name, 1), max=limits.highest.get(name))
        for name, number in limits.captured.items()
    }


def _value(name: str, boundary: Boundary, sizes: Mapping[str, Size], batch: BatchReport) -> Value:
    role = batch.roles.get(label_of(boundary.node)) if boundary.producer < 0 else None
    if role is not None:
        dim = role.dim
    else:
        usual = batch_dim(shape_of(boundary.node), sizes)
        dim = batch.dims.get(boundary.node, usual)
    tensor = tensor_of(boundary.node)
    integer = boundary.producer < 0 and not (tensor.is_floating_point() or tensor.dtype == torch.bool)
    return Value(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=written_shape(shape_of(boundary.node)),
        producer=boundary.producer,
        consumers=boundary.consumers,
        requires_grad=boundary.requires_grad,
        batch_dim=dim,
        role=UNSET if role is None else role.kind,
        keeps_dtype=(boundary.producer >= 0 and keeps_dtype(boundary.node)) or UNSET,
        bound=index_bound(boundary.node) if integer else None,
        dim_order=(boundary.producer >= 0 and _dim_order(tensor)) or UNSET,
    )


def written_shape(shape: Sequence[int]) -> tuple[int | str, ...]:
    """A shape as the manifest has it: ``("batch", 128)``."""
    return tuple(size.text if isinstance(size, SymbolicSize) else size for size in shape)


def _dim_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor as they lie in memory, outermost first; empty if it is contiguous, or has gaps
    or overlaps, and is sent without them."""
    order: tuple[int, ...] = tensor.dim_order()
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else ()


def batch_dim(shape: Sequence[int], sizes: Collection[str]) -> int | None:
    """The dimension along which to cut a value if nothing is known about its rows.

    It is the first one that depends on the batch, or dimension 0 if the model fixes its batch; None without one.

    Args:
        shape: of the value.
        sizes: the names of the dynamic sizes.
    """
    if BATCH not in sizes:
        return 0 if shape else None
    in_batch = (
        dim for dim, size in enumerate(shape) if isinstance(size, SymbolicSize) and BATCH in map(str, size.symbols)
    )
    return next(in_batch, None)


def _lists(captured: Captured) -> Iterator[str]:
    """The places in the model's results that are lists, not tuples."""
    for name in ("outputs", "evaluation_outputs"):
        yield from (place for place, sequence in sequences(getattr(captured, name), name) if isinstance(sequence, list))


def _source_names(plan: Plan, blocks: BlockClasses) -> dict[fx.Node, str]:
    """The name of each value that crosses between stages; several values may have the same name.

    It is the name of the model's argument, the key of a dict that the model returns, or else the name in its source.
    """
    captured = plan.captured
    keys: dict[str, str] = {}
    for path, label in pytree.tree_flatten_with_path([captured.evaluation_outputs, captured.outputs])[0]:
        for entry in path:
            if isinstance(entry, pytree.MappingKey):
                keys[label] = str(entry.key)
    names: dict[fx.Node, str] = {}
    for boundary in plan.boundaries:
        node = boundary.node
        if node.op == "placeholder":
            source_name = label_of(node)
        elif node in captured.returned:
            source_name = keys.get(label_of(node)) or blocks.names.value_name(node, default="output")
        else:
            source_name = blocks.names.value_name(node)
        names[node] = variable(source_name, "x")
    return {**names, **_unpacked_names(names)}


def _unpacked_names(names: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """The names of values that are parts of one tuple, where the model unpacks it: ``cos, sin``."""
    parts: dict[str, list[fx.Node]] = {}
    for node, name in names.items():
        if any(place.name == name and place.path for place in _variables(node)):
            parts.setdefault(name, []).append(node)
    unpacked: dict[fx.Node, str] = {}
    for nodes in parts.values():
        places_of_nodes = (
            sorted((place for place in _variables(node) if not place.path), key=_order) for node in nodes
        )
        first = [next((place.name for place in places if place.name != RETURNED), "") for places in places_of_nodes]
        if len(set(first)) == len(nodes) > 1 and all(map(is_plain, first)):
            unpacked |= zip(nodes, first, strict=True)
    return unpacked


def _variables(node: fx.Node) -> list[VariablePlace]:
    """The variables of the model's source that had a value, or had it in a tuple."""
    return [place for places in node.meta.get("variables", {}).values() for place in places]


def _order(place: VariablePlace) -> int:
    return place.order


def _unique(crossing: Sequence[Boundary], base_names: Mapping[fx.Node, str], reserved: set[str]) -> dict[Boundary, str]:
    """Make the names of values unique, as the manifest needs them: ``h``, ``h_1``."""
    names: dict[Boundary, str] = {}
    for boundary in crossing:
        names[boundary] = unused(base_names[boundary.node], reserved | set(names.values()))
    return names


_BUILT_IN = frozenset({"aten", "prim", "prims", FUNCTIONS})


def _libraries(captured: Captured) -> dict[str, str]:
    """The libraries outside torch whose operations a model uses: namespace of the operations → module to import.

    Raises:
        CaptureError: no module that can be imported defines an operation, for example one of the model's own file.
    """
    modules: dict[str, str] = {}
    for node in captured.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace in (_BUILT_IN | modules.keys()):
            continue
        module = defining_module(target) or target.namespace
        try:
            importable = find_spec(module) is not None
        except (ImportError, ValueError):
            importable = False
        if not importable:
            raise CaptureError(
                f"The model uses {target}, which is defined in {module}: a package could not import it.",
                "move the definition of the operation into a module that is installed.",
            )
        modules[target.namespace] = module
    return dict(sorted(modules.items()))
