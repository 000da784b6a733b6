"""The tables of a captured model: its state, its modules, and the nesting of its arguments and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from pipegraph.errors import CaptureError
from pipegraph.graph.captured import ModuleEntry, StateEntry, plain_containers
from pipegraph.graph.class_text import class_text
from pipegraph.graph.initialisation import initialisation_of
from pipegraph.graph.internals import is_persistent, pytree
from pipegraph.graph.nodes import label_of

_TORCH = Path(torch.__file__).parent


def state_of(model: nn.Module) -> tuple[dict[str, StateEntry], dict[str, torch.Tensor]]:
    """Every parameter and buffer, and its tensor, under every name it has, in the order of ``state_dict()``."""
    state: dict[str, StateEntry] = {}
    tensors: dict[str, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    initialisation = initialisation_of(model)
    for prefix, module in model.named_modules(remove_duplicate=False):
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for kind, named in (("parameter", parameters), ("buffer", buffers)):
            for name, tensor in named:
                fqn = f"{prefix}.{name}" if prefix else name
                tensors[fqn] = tensor.detach()
                state[fqn] = StateEntry(
                    fqn=fqn,
                    kind=kind,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    requires_grad=kind == "parameter" and tensor.requires_grad,
                    persistent=kind == "parameter" or is_persistent(module, name),
                    canonical=first_name.setdefault(id(tensor), fqn),
                    initialisation=initialisation.get(id(tensor)),
                )
    return state, tensors


def modules_of(model: nn.Module) -> dict[str, ModuleEntry]:
    """Every module under every name it has."""
    lines = {cls: _first_line(cls) for cls in {type(module) for module in model.modules()}}
    return {
        fqn: ModuleEntry(
            fqn=fqn,
            class_name=type(module).__name__,
            training=module.training,
            source=lines[type(module)],
            module=module,
        )
        for fqn, module in model.named_modules(remove_duplicate=False)
    }


def _first_line(cls: type) -> str:
    """``file.py:line`` of a class outside torch, or nothing. Only the file's name, so that output does not depend on a
    machine's folders."""
    found = class_text(cls)
    return "" if found is None or _TORCH in found.file.parents else f"{found.file.name}:{found.line}"


def inputs_of(
    exported: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """The model's arguments with names as leaves: positional ones, those by keyword, and, name → value, all that are no
    tensors.

    A tensor that the model does not read keeps its name, because the caller passes it all the same.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    names = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    assert len(names) == len(leaves), "torch.export changed the number of inputs"
    constants: dict[str, Any] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            continue
        if leaf is not None and not isinstance(leaf, (bool, int, float, str)):
            raise CaptureError(
                f"Input {name} is a {type(leaf).__name__}; a pipeline's inputs are tensors, numbers, strings or "
                "None.\nTry: build the object inside the model's forward."
            )
        constants[name] = leaf
    positional, keywords = plain_containers(pytree.tree_unflatten(names, spec))
    return tuple(positional), keywords, constants


def outputs_of(graph: fx.Graph, exported: ExportedProgram) -> Any:
    """The nesting of what the model returns, with names of graph values as leaves."""
    (output,) = graph.find_nodes(op="output")
    leaves: list[str | None] = []
    for value in output.args[0]:
        if value is not None and not isinstance(value, fx.Node):
            what = repr(value) if isinstance(value, (bool, int, float, str)) else "a number that it computes"
            raise CaptureError(
                f"The model returns {what}, which is neither a tensor nor None.\nTry: return tensors only."
            )
        leaves.append(None if value is None else label_of(value))
    spec = exported.call_spec.out_spec
    assert spec is not None
    return plain_containers(pytree.tree_unflatten(leaves, spec))
