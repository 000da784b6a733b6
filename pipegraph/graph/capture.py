"""``capture``: a model becomes one flat graph through ``torch.export``, at no memory cost for its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from pipegraph.debug import InvalidGraphError, dump
from pipegraph.errors import CaptureError
from pipegraph.garbage import rare_collection
from pipegraph.graph.audit.audit import audit_model, reason_beside, warn_of_written
from pipegraph.graph.audit.hooks import check_hooks, gradient_hooks
from pipegraph.graph.audit.memory import check_constants, check_layouts, check_overlaps
from pipegraph.graph.batch.report import report_rows
from pipegraph.graph.batch.roles import DeclaredRoles, InputTensor, RoleAssignment, assign_roles, declared_roles
from pipegraph.graph.batch.value_proof import compare_halves
from pipegraph.graph.captured import BRANCH, Captured, OtherSize
from pipegraph.graph.evaluation_mode import EvaluationCaptureError, add_evaluation_mode
from pipegraph.graph.export.dynamic_shapes import BATCH, WantedSizes, wanted_sizes
from pipegraph.graph.export.executed_lines import LineRecorder, record_lines
from pipegraph.graph.export.input_sizes import fixed_sizes
from pipegraph.graph.export.isolation import attributes_restored, torch_state_restored
from pipegraph.graph.export.operation_record import device_branch, operations_by_layer
from pipegraph.graph.export.other_dtype import mark_dtypes, other_dtypes
from pipegraph.graph.export.trace import Example, Trace, trace
from pipegraph.graph.export.unrolled_sizes import unrolled_sizes
from pipegraph.graph.graph_text import segments_text
from pipegraph.graph.layer_blocks import NotRepeatedError, Recorded, are_repeated
from pipegraph.graph.layer_runs import few_layers, layer_runs
from pipegraph.graph.model_structure import (
    ASKS_ABOUT_EXPORT,
    check_classes,
    check_keys,
    check_module_names,
    evaluation_outputs_of,
    inputs_of,
    modes_of,
    modules_of,
    outputs_of,
    source_has,
)
from pipegraph.graph.nodes import dtypes_of
from pipegraph.graph.partition.split_points import find_segments
from pipegraph.graph.pass_order import run_all_passes, run_passes
from pipegraph.graph.passes.modes import may_differ_by_mode, settle_fixed_modes
from pipegraph.graph.passes.resize import resize
from pipegraph.graph.quirks import quirks
from pipegraph.graph.repeated_layers import with_all_layers
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.graph.symbolic_size import FixedSize, InputDimension
from pipegraph.graph.tensor_hooks import MENTIONS_HOOKS
from pipegraph.progress import listen, track
from pipegraph.torch_private.export import CAPTURE_LOCK, export_hidden
from pipegraph.torch_private.pytrees import pytree


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    batch_dims: Mapping[str, Any] | None = None,
) -> Captured:
    """Capture ``model`` on the inputs of one microbatch.

    The model is left as it was, attributes that its ``forward`` sets included: fake tensors stand in for its parameters
    while it is traced, so that neither memory nor time goes into them. It is traced in training mode, so that dropout
    and batch norm are seen, and in evaluation mode if that may differ. What differs is a branch of its stages. A model
    that is in evaluation mode itself, and cannot be captured in training mode too, is captured in evaluation mode
    alone, with a warning: its stages refuse training mode.

    Threads capture one after the other.

    Args:
        model: any module that ``torch.export`` takes; parameters may be on the meta device.
        args, kwargs: its inputs, one microbatch; tensors may be real or on the meta device.
        dynamic_shapes: the sizes that may vary, in the form of ``torch.export``; a string in place of a ``Dim`` also
            names a size, and equal names are one size. None lets every size vary that the model lets vary, False fixes
            all. The size called ``batch`` is the one that is cut into microbatches; without one, it is the first
            dimension of the first tensor.
        batch_dims: the role of inputs, by name: the dimension of their rows, None if every microbatch takes the whole,
            "list" if the caller gives one value for each microbatch. A tensor inside an argument is named
            ``argument.key``; "target" is that of the loss. Other roles are found. All roles are proved: what mixes
            the rows of a batch is in ``Captured.batch``.

    Raises:
        CaptureError: ``torch.export`` cannot trace the model, a backward would be lost, or evaluation mode cannot be
            written as branches; the message names the line of the model's source. Or the model fixes a size that
            ``dynamic_shapes`` lets vary, or a name cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"capture takes a torch.nn.Module, not {type(model).__name__}.", "pipegraph.capture(model, args=(tokens,))."
        )
    if not isinstance(args, tuple):
        raise CaptureError(f"args must be a tuple, not {type(args).__name__}.", "args=(tokens,).")
    if not isinstance(kwargs or {}, dict) or not all(isinstance(name, str) for name in kwargs or {}):
        raise CaptureError("kwargs must be a dict from names to inputs.", 'kwargs={"mask": mask}.')
    example = Example(args, dict(kwargs or {}))
    _check(model, example)
    with CAPTURE_LOCK, rare_collection(), attributes_restored(model), torch_state_restored():
        declared = declared_roles(model, *example, batch_dims)
        requested_sizes = wanted_sizes(model, *example, dynamic_shapes, declared.rows)
        captured_now = partial(_capture_whole, model, example, requested_sizes, declared)
        return _capture(model, example, True, captured_now)


def capture_source(source: ModelSource) -> Captured:
    """Capture the model of a file or of a configuration, as `capture` does, at the requested sizes.

    Raises:
        CaptureError: as `capture` does; or the model does not take the requested numbers of rows and tokens.
    """
    model, example = source.model, Example(source.args, source.kwargs)
    _check(model, example)
    with CAPTURE_LOCK, rare_collection(), attributes_restored(model), torch_state_restored():
        declared = declared_roles(model, *example, source.batch_dims)
        requested_sizes = wanted_sizes(model, *example, source.dynamic_shapes, declared.rows)
        captured_now = partial(_capture_whole, model, example, requested_sizes, declared, source.batch, source.seq)
        return _capture(model, example, True, captured_now)


def capture_rows(source: ModelSource, rows: int, has_dtypes: bool = False) -> Captured:
    """Capture a model with ``rows`` rows in a microbatch, to price it and not to write it.

    It does not capture evaluation mode; which dtypes follow the model's, which needs a second export, only if
    ``has_dtypes``. If the source makes inputs of any number of rows, all sizes are fixed, which takes a third of the
    time.

    Raises CaptureError as `capture_source` does.
    """
    model = source.model
    if source.inputs_of is None:
        example, shapes, batch, seq = Example(source.args, source.kwargs), source.dynamic_shapes, rows, source.seq
    else:
        example, shapes, batch, seq = Example((), source.inputs_of(rows)), False, None, None
    _check(model, example)
    with CAPTURE_LOCK, rare_collection(), attributes_restored(model), torch_state_restored():
        declared = declared_roles(model, *example, source.batch_dims)
        requested_sizes = wanted_sizes(model, *example, shapes, declared.rows)
        captured_now = partial(
            _capture_whole,
            model,
            example,
            requested_sizes,
            declared,
            batch,
            seq,
            is_written=False,
            has_dtypes=has_dtypes,
        )
        return _capture(model, example, False, captured_now)


def _check(model: nn.Module, example: Example) -> None:
    check_module_names(model)
    check_classes(model)
    check_layouts(model)
    check_overlaps(model)
    check_hooks(model)
    check_keys("argument", list(example))
    for leaf in pytree.tree_leaves(example):
        if is_dataclass(leaf):
            name = type(leaf).__name__
            raise CaptureError(
                f"An input of {type(model).__name__} is a {name}, a dataclass that torch.export does not know.",
                f"torch.export.register_dataclass({name}), before the capture.",
            )


def _capture(model: nn.Module, example: Example, is_written: bool, captured_now: Callable[[], Captured]) -> Captured:
    """Capture a model, with a few of its layers if the others are equal.

    Args:
        is_written: whether the graph has what the model does in evaluation mode.
        captured_now: captures the model with the layers that it has then.
    """
    with quirks():
        captured = _capture_as_trained(model, example, is_written, captured_now)
    if captured.not_trained:
        warnings.warn(
            f"{captured.model_name} is captured in evaluation mode alone, and its stages refuse training mode: "
            f"{captured.not_trained}",
            stacklevel=3,
        )
    return captured


def _capture_as_trained(
    model: nn.Module, example: Example, is_written: bool, captured_now: Callable[[], Captured]
) -> Captured:
    """Capture what a model does when nothing is exported, if it asks, and if that can be captured."""

    def captured() -> Captured:
        return _capture_in_part(model, example, is_written, captured_now) or captured_now()

    if not source_has(model, ASKS_ABOUT_EXPORT):
        return captured()
    try:
        with export_hidden(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            captured_as_trained = captured()
    except CaptureError:
        return captured()
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return captured_as_trained


def _capture_in_part(
    model: nn.Module, example: Example, is_written: bool, captured_now: Callable[[], Captured]
) -> Captured | None:
    """Capture a model with a few of its equal layers, and add the others. Returns None if it has none, or if it does
    not repeat in them what it does in the few. The arguments are as `_capture` has them."""
    runs = layer_runs(model)
    if not runs or source_has(model, MENTIONS_HOOKS):  # a layer may have a hook that the others do not have
        return None
    layers = {name: layer for run in runs for name, layer in run.equal_layers.items()}

    def recorded() -> list[Recorded]:
        modes = modes_of(model)[: 2 if is_written else 1]
        return [operations_by_layer(model, mode, *example, layers) for mode in modes]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            of_all_layers = recorded()
            with few_layers(runs):
                if not all(are_repeated(*pair, runs) for pair in zip(recorded(), of_all_layers, strict=True)):
                    return None
                captured = captured_now()
        except InvalidGraphError:
            raise
        except Exception:  # what the model raises without its other layers
            return None
        try:
            captured = with_all_layers(captured, model, runs)
        except NotRepeatedError:
            return None
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    captured = replace(captured, segments=find_segments(captured))
    dump("segments", lambda: segments_text(captured))
    return captured


def _capture_whole(
    model: nn.Module,
    example: Example,
    requested_sizes: WantedSizes,
    declared: DeclaredRoles,
    batch: int | None = None,
    seq: int | None = None,
    is_written: bool = True,
    not_trained: str = "",
    only_once: bool = False,
    has_dtypes: bool = False,
    asks_for_mode: bool = False,
) -> Captured:
    """Capture a model with all its layers.

    Args:
        is_written: whether the graph is to be written as source: only then it has what the model does in evaluation
            mode too.
        not_trained: why it does not have what the model does in training mode; empty if it does.
        only_once: whether to leave out its other sizes.
        has_dtypes: whether it knows which dtypes follow the model's though it is not written.
        asks_for_mode: whether a function outside of the model's classes asks for the mode.
    """
    phases = track(f"capturing {type(model).__name__}", ("export", "flatten", "modes", "segments", "other sizes"))
    next(phases)
    modules = modules_of(model)
    try:
        traced = trace(model, example, requested_sizes, not not_trained, declared.dims)
    except CaptureError as error:
        raise (reason_beside(model, *example) or error) from error.__cause__
    roles, traced = _with_roles(model, traced, declared)
    if roles.fixed and requested_sizes.fixed is not None:
        requested_sizes = requested_sizes.with_fixed_rows(roles.fixed)
        traced = trace(model, example, requested_sizes, not not_trained, declared.dims)
        roles, traced = _with_roles(model, traced, declared)
    (args, kwargs), exported, graph = traced.example, traced.exported, traced.graph
    state, tensors = traced.state, traced.tensors
    sizes = traced.sizes_of(example, batch, seq)
    dump("export", lambda: str(exported.program))
    fixed_dimensions = dict(fixed_sizes(exported, traced.sizes, requested_sizes))
    next(phases)
    training = exported.mode[model]
    if is_written or has_dtypes:
        mark_dtypes(graph, exported, model, args, kwargs, traced.names)
        for node in graph.find_nodes(op="get_attr"):
            dtype, other_dtype = dtypes_of(node)
            if node.meta["kind"] == "constant" and other_dtype not in (None, dtype):
                state[node.target] = replace(state[node.target], follows_model=True)
    run_all_passes(graph, state)
    next(phases)
    has_modes = is_written and (asks_for_mode or may_differ_by_mode(graph, modules))
    if training and not has_modes:
        run_passes(graph, [partial(settle_fixed_modes, evaluation=None, modules=modules, mode=exported.mode)], state)
    elif training:
        try:
            add_evaluation_mode(graph, model, args, kwargs, exported, traced.names, modules, state, tensors)
        except EvaluationCaptureError as error:
            if any(entry.training for entry in modules.values()):
                raise CaptureError(error.message) from error
            return _capture_whole(
                model,
                example,
                requested_sizes,
                declared,
                batch,
                seq,
                is_written,
                error.difference,
                only_once,
            )
    if sizes != traced.sizes.values_in(traced.example):
        run_passes(graph, [partial(resize, sizes=sizes)], state)
    next(phases)
    read = {node.target for node in graph.find_nodes(op="get_attr")}
    for fqn in [fqn for fqn, entry in state.items() if entry.kind == "constant" and fqn not in read]:
        del state[fqn], tensors[fqn]
    hooks = gradient_hooks(model, graph, state, tensors)
    positional, keywords, constants = inputs_of(exported.program, args, kwargs)
    captured = Captured(
        graph=graph,
        model_name=type(model).__name__,
        args=positional,
        kwargs=keywords,
        outputs=outputs_of(graph, exported.program),
        evaluation_outputs=evaluation_outputs_of(graph),
        constants=constants,
        state=state,
        tensors=tensors,
        modules=modules,
        sizes=replace(
            requested_sizes.limited(traced.limits(sizes), fixed_dimensions), fixed=tuple(fixed_dimensions.values())
        ),
        training=training,
        not_trained="" if training else not_trained or exported.training_error,
        device_branch="" if only_once else device_branch(model, exported.mode, args, kwargs),
        batch=report_rows(graph, roles, declared, partial(compare_halves, model, exported.mode, traced.example)),
        hooks=hooks,
    )
    check_keys("output", captured.outputs)
    modes = [exported.mode, *([modes_of(model).evaluation] if training else [])]
    if is_written:
        lines = LineRecorder()
        if only_once:
            record_lines(lines, model, modes, *traced.example)
        else:
            check_constants(model, exported.program.constants)
            written = [name for mode in modes for name in audit_model(model, mode, *traced.example, lines)]
            warn_of_written(model, dict.fromkeys(written))
        for dtype in other_dtypes(model) if exported.reads_dtype else ():
            record_lines(lines, model, modes[:1], *traced.example, dtype)
        if training and lines.asks_for_mode and not has_modes:
            return _capture_whole(
                model, example, requested_sizes, declared, batch, seq, only_once=only_once, asks_for_mode=True
            )
        captured = replace(captured, lines=lines.lines(model))
    captured = replace(captured, segments=find_segments(captured))
    dump("segments", lambda: segments_text(captured))
    if only_once or not is_written or requested_sizes.fixed is None:
        return captured
    next(phases)

    def again(other_example: Example) -> Captured:
        first, example_length = (candidate.tensors()[0][1].shape[1:2] for candidate in (other_example, example))
        tokens = seq if first == example_length else None
        return _capture_whole(
            model, other_example, requested_sizes, declared, batch, tokens, True, not_trained, only_once=True
        )

    by_user = requested_sizes.fixed  # stays fixed
    fixed = {dimension: size for dimension, size in fixed_dimensions.items() if dimension not in by_user}
    other_sizes = _other_sizes(captured, model, exported.mode, example, fixed, traced.names.by_dimension, again)
    return replace(captured, other_sizes=tuple(other_sizes))


def _with_roles(model: nn.Module, traced: Trace, declared: DeclaredRoles) -> tuple[RoleAssignment, Trace]:
    """The roles of the inputs, and the trace with one name for the sizes of all rows."""
    inputs = [
        InputTensor(node, traced.sizes.position_of(str(node.target)))
        for node in traced.graph.find_nodes(op="placeholder")
    ]
    names = traced.names.by_dimension if traced.names.by_user else {}
    roles = assign_roles(traced.graph, inputs, traced.sizes.captured, declared, names)
    if any(str(traced.sizes.symbol_of(dimension)) != BATCH for dimension in roles.names):
        traced = traced.renamed(model, traced.names.with_rows(roles.names))
    return roles.renamed(traced.sizes.captured), traced


def _other_sizes(
    captured: Captured,
    model: nn.Module,
    mode: Mapping[nn.Module, bool],
    example: Example,
    fixed: Mapping[InputDimension, FixedSize],
    names: Mapping[InputDimension, str],
    again: Callable[[Example], Captured],
) -> Iterator[OtherSize]:
    """Capture a model again with another number of iterations of its loops.

    Args:
        captured: the model.
        mode: whether each module is in training mode in its graph.
        fixed: the sizes of the example that the user did not fix, and that do not vary.
        names: of sizes, by the dimension.
        again: captures the model on other inputs.
    """
    branches = any(BRANCH in node.meta for node in captured.graph.nodes)
    modes = [mode, *([modes_of(model).evaluation] if branches else [])]
    for size in unrolled_sizes(model, modes, example, fixed, names):
        try:
            with warnings.catch_warnings(), listen(lambda task, done, total: None):
                warnings.simplefilter("ignore")  # they were shown for the example
                variant = again(size.example)
        except CaptureError:
            continue
        captured_sizes, variant_sizes = captured.sizes, variant.sizes
        is_alike = (captured_sizes.lowest, captured_sizes.highest, captured_sizes.conditions) == (
            variant_sizes.lowest,
            variant_sizes.highest,
            variant_sizes.conditions,
        )
        if is_alike and captured.not_trained == variant.not_trained and size.name not in captured_sizes.captured:
            places = tuple(fixed[dimension].place for dimension in sorted(size.dimensions))
            yield OtherSize(size.name, places, size.size, size.lowest, size.other_size, variant)
