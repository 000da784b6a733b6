"""``capture``: a model becomes one flat graph through ``torch.export``, at no memory cost for its parameters."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from pipegraph.errors import CaptureError
from pipegraph.graph.captured import Captured, ModuleEntry, StateEntry
from pipegraph.graph.export.call_arguments import plain_containers
from pipegraph.graph.export.flatten import flatten
from pipegraph.graph.export.mode_comparison import same_in_both_modes
from pipegraph.graph.export.torch_export import export, export_in
from pipegraph.graph.nodes import label_of
from pipegraph.graph.partition.segments import find_segments
from pipegraph.graph.passes.buffer_casts import tie_casts_to_buffers
from pipegraph.graph.passes.mode_flags import mark_mode_differences, may_differ_by_mode
from pipegraph.graph.passes.simplify import simplify
from pipegraph.graph.passes.view_layouts import relax_attention_views
from pipegraph.progress import track

_TORCH = Path(torch.__file__).parent


def capture(model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Captured:
    """Capture ``model`` on the inputs of one microbatch.

    The model is left as it was: its parameters stand in as fake tensors while it is traced, so that neither memory nor
    time goes into them, and it is traced in training mode, so that dropout and batch norm are seen. A model that traces
    only as it is (or only in evaluation mode) is captured so, with a warning.

    Args:
        model: any module that ``torch.export`` takes; parameters may be on the meta device.
        args, kwargs: its inputs, one microbatch; tensors may be real or on the meta device.

    Raises:
        CaptureError: ``torch.export`` cannot trace it; names the line of the model's own source.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"capture takes a torch.nn.Module, not {type(model).__name__}.\n"
            "Try: pipegraph.capture(model, args=(tokens,))."
        )
    if not isinstance(args, tuple):
        raise CaptureError(f"args must be a tuple, not {type(args).__name__}.\nTry: args=(tokens,).")
    kwargs = dict(kwargs or {})
    phases = track(f"capturing {type(model).__name__}", ("export", "flatten", "modes", "segments"))
    next(phases)
    state, tensors = _state(model)
    modules = _modules(model)
    exported, training = export(model, args, kwargs)
    next(phases)
    graph = flatten(exported, state, tensors)
    tie_casts_to_buffers(graph, state)
    simplify(graph)
    next(phases)
    if training and may_differ_by_mode(graph, modules):
        alike = same_in_both_modes(model, args, kwargs)
        other = graph if alike else _in_evaluation(model, args, kwargs, state, tensors)
        if other is not None:
            mark_mode_differences(graph, other, modules)
    relax_attention_views(graph)
    next(phases)
    inputs, constants = _inputs(exported, args, kwargs)
    captured = Captured(
        graph=graph,
        model_name=type(model).__name__,
        args=inputs[0],
        kwargs=inputs[1],
        outputs=_outputs(graph, exported),
        constants=constants,
        state=state,
        tensors=tensors,
        modules=modules,
        training=training,
    )
    return replace(captured, segments=find_segments(captured))


def _in_evaluation(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: dict[str, StateEntry],
    tensors: dict[str, torch.Tensor],
) -> fx.Graph | None:
    """The graph of the model in evaluation mode; None where that cannot be traced."""
    try:
        exported = export_in(dict.fromkeys(model.modules(), False), model, args, kwargs)
        state = dict(state)
        graph = flatten(exported, state, dict(tensors))
    except Exception:  # the mode that the stages follow was captured; this one is only compared with it
        return None
    tie_casts_to_buffers(graph, state)
    simplify(graph)
    return graph


def _state(model: nn.Module) -> tuple[dict[str, StateEntry], dict[str, torch.Tensor]]:
    """Every parameter and buffer under every name it has, in the order of ``state_dict()``."""
    state: dict[str, StateEntry] = {}
    tensors: dict[str, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for kind, named in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in named.items():
                if tensor is None:
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                tensors[fqn] = tensor.detach()
                state[fqn] = StateEntry(
                    fqn=fqn,
                    kind=kind,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    requires_grad=kind == "parameter" and tensor.requires_grad,
                    persistent=kind == "parameter" or name not in module._non_persistent_buffers_set,
                    canonical=first_name.setdefault(id(tensor), fqn),
                )
    return state, tensors


def _modules(model: nn.Module) -> dict[str, ModuleEntry]:
    sources = {cls: _where_written(cls) for cls in {type(module) for module in model.modules()}}  # it reads whole files
    return {
        fqn: ModuleEntry(
            fqn=fqn,
            class_name=type(module).__name__,
            training=module.training,
            source=sources[type(module)],
            module=module,
        )
        for fqn, module in model.named_modules(remove_duplicate=False)
    }


def _where_written(cls: type) -> str:
    """``file.py:line`` of a class outside torch, or nothing: the file's name alone, so that output does not depend on a
    machine's folders."""
    try:
        file = inspect.getsourcefile(cls)
        _, line = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return ""
    return "" if file is None or _TORCH in Path(file).parents else f"{Path(file).name}:{line}"


def _inputs(
    exported: torch.export.ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """The nesting of the model's arguments with names as leaves, and the arguments that are no tensors.

    A tensor that the model does not read keeps its name: the caller passes it all the same.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    names = exported.graph_signature.user_inputs
    constants: dict[str, Any] = {}
    labels: list[str | None] = []
    placeholders = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    assert len(placeholders) == len(leaves) == len(names), "export changed the number of inputs"
    for name, leaf in zip(placeholders, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            if leaf is not None and not isinstance(leaf, (bool, int, float, str)):
                raise CaptureError(
                    f"Input {name} is a {type(leaf).__name__}; a pipeline's inputs are tensors, numbers, strings or "
                    "None.\nTry: build the object inside the model's forward."
                )
            constants[name] = leaf
        labels.append(name)
    nested = plain_containers(pytree.tree_unflatten(labels, spec))
    return (tuple(nested[0]), nested[1]), constants


def _outputs(graph: fx.Graph, exported: torch.export.ExportedProgram) -> Any:
    """The nesting of what the model returns, with names of graph values as leaves."""
    output = next(node for node in graph.nodes if node.op == "output")
    leaves: list[str | None] = []
    for value in output.args[0]:
        if isinstance(value, fx.Node):
            leaves.append(label_of(value))
        elif value is None:
            leaves.append(None)
        else:
            raise CaptureError(
                f"The model returns {value!r}, which is neither a tensor nor None.\nTry: return tensors only."
            )
    spec = exported.call_spec.out_spec
    assert spec is not None
    return plain_containers(pytree.tree_unflatten(leaves, spec))
