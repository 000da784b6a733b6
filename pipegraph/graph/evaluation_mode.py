"""What a model does in evaluation mode, as branches of its graph of training mode."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from pipegraph.debug import InvalidGraphError
from pipegraph.errors import CaptureError
from pipegraph.graph.captured import ModuleEntry, StateEntry
from pipegraph.graph.export.dtype_reads import DtypeReads
from pipegraph.graph.export.dynamic_shapes import SizeNames
from pipegraph.graph.export.explanations import explanation
from pipegraph.graph.export.flatten import flatten
from pipegraph.graph.export.input_sizes import FixedSizeNeededError
from pipegraph.graph.export.operation_record import lines_on_in_evaluation, same_in_both_modes
from pipegraph.graph.export.other_dtype import mark_dtypes
from pipegraph.graph.export.torch_export import Exported, export_in
from pipegraph.graph.mode_differences import OtherGraphError
from pipegraph.graph.model_structure import modes_of
from pipegraph.graph.nodes import source_line
from pipegraph.graph.pass_order import run_all_passes, run_passes
from pipegraph.graph.passes.modes import mark_lines_on, mark_mode_differences, settle_fixed_modes


class EvaluationCaptureError(Exception):
    """What a model does in evaluation mode cannot be added to its graph of training mode.

    Attributes:
        message: of a `CaptureError`.
        difference: in one line.
    """

    def __init__(self, message: str, difference: str) -> None:
        super().__init__(message)
        self.message, self.difference = message, difference


def add_evaluation_mode(
    graph: fx.Graph,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    exported: Exported,
    names: SizeNames,
    modules: Mapping[str, ModuleEntry],
    state: dict[str, StateEntry],
    tensors: dict[str, Tensor],
) -> None:
    """Add to a graph in training mode what the model does in evaluation mode, with the constants that it reads there.

    Raises:
        EvaluationCaptureError: that cannot be traced, or no branch can hold it.
    """
    lines_on = lines_on_in_evaluation(model, args, kwargs)  # which takes a tenth of the time of an export
    if lines_on is not None:
        settle = partial(settle_fixed_modes, evaluation=None, modules=modules, mode=exported.mode)
        mark = partial(mark_lines_on, modules=modules, lines=lines_on)
        run_passes(graph, [settle, mark], state)
        return
    both_state, both_tensors = dict(state), dict(tensors)
    equal = same_in_both_modes(model, args, kwargs)
    evaluation = graph if equal else _evaluation_graph(model, args, kwargs, exported, names, both_state, both_tensors)
    settle = partial(settle_fixed_modes, evaluation=evaluation, modules=modules, mode=exported.mode)
    mark = partial(mark_mode_differences, evaluation=evaluation, modules=modules)
    try:
        run_passes(graph, [settle, mark], both_state)
    except OtherGraphError as error:
        line = source_line(error.node)
        raise EvaluationCaptureError(
            f"{type(model).__name__} does in evaluation mode what a stage cannot: what the modes do otherwise is no "
            f"branch of one forward, or changes a shape, or writes in evaluation mode.\n  at {line}\n"
            "Try: do that outside of the model, or model.eval() in build_model for stages that do not train.",
            f"the modes differ by more than branches, at {line}",
        ) from error
    for node in graph.find_nodes(op="get_attr"):  # with constants that only evaluation mode reads
        state[node.target], tensors[node.target] = both_state[node.target], both_tensors[node.target]


def _evaluation_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    training: Exported,
    names: SizeNames,
    state: dict[str, StateEntry],
    tensors: dict[str, Tensor],
) -> fx.Graph:
    """The graph of the model in evaluation mode. Its own constants are added to ``state`` and ``tensors``.

    Raises:
        EvaluationCaptureError: it cannot be traced.
    """
    mode = modes_of(model).evaluation
    try:
        fixed, keeps_int = training.fixed, training.keeps_int
        with DtypeReads() as reads:
            program = export_in(mode, model, args, kwargs, fixed=fixed, keeps_int=keeps_int)
        exported = Exported(program, mode, fixed, keeps_int=keeps_int, reads_dtype=reads.has_reads)
        graph, _ = flatten(exported.program, state, tensors, names)
        mark_dtypes(graph, exported, model, args, kwargs, names)
        run_all_passes(graph, state, prefix="evaluation_")
    except InvalidGraphError:
        raise
    except Exception as error:  # whatever the model raises
        cause = error
        if isinstance(error, FixedSizeNeededError):
            cause = CaptureError(
                f"It takes any size in training mode alone.\n  at {error.line}", "dynamic_shapes=False."
            )
        message = explanation(model, cause, " in evaluation mode")
        raise EvaluationCaptureError(message, message.partition("\n")[0]) from error
    return graph
