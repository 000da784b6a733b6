"""Run the written module of a stage on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.codegen.validation.captured_stage import StageResult, StageState, stage_inputs
from pipegraph.codegen.validation.recorder import TermRecorder
from pipegraph.codegen.validation.repeated_calls import RepeatedCalls
from pipegraph.codegen.validation.settings import Setting
from pipegraph.graph.captured import Captured
from pipegraph.graph.custom_functions import applied_functions, apply_written
from pipegraph.graph.export.isolation import MOMENTUM_OF_ALL, batch_norms_over_all
from pipegraph.graph.partition.stages import StageGraph
from pipegraph.torch_private.export import ApplyFunction, autograd_functions_wrapped
from pipegraph.torch_private.modules import is_persistent
from pipegraph.torch_private.pytrees import pytree


class WrongStateError(Exception):
    """The parameters and buffers of a stage are not those of the captured graph."""


def set_state(captured: Captured, stage: StageGraph, module: nn.Module, state: StageState) -> None:
    """Put fake tensors in the place of a stage's parameters and buffers.

    A batch norm with ``momentum=None`` gets the number that it has in the captured graph: it would compute one from its
    count of batches.
    """
    for inner in batch_norms_over_all(module):
        inner.momentum = MOMENTUM_OF_ALL  # type: ignore[assignment]
    for fqn in stage.state:
        owner, _, name = fqn.rpartition(".")
        setattr(module.get_submodule(owner), name, state.tensors[captured.state[fqn].canonical])


def run_written(
    stage: StageGraph,
    module: nn.Module,
    state: StageState,
    setting: Setting,
    recorder: TermRecorder,
    calls: RepeatedCalls | None,
) -> StageResult:
    """Run the module of a stage.

    Args:
        module: with the tensors of ``state``.
        calls: the calls that were run before, in this setting; None runs all.

    Raises:
        Exception: whatever its source raises.
    """
    state.name(recorder)
    module.train(setting.training)
    package = type(module).__module__.partition(".")[0]
    for inner in module.modules():
        if inner is not module and type(inner).__module__.partition(".")[0] == package:
            forward = partial(type(inner).forward, inner)
            inner.forward = forward if calls is None else _forward_once(inner, forward, recorder, calls)
    inputs = stage_inputs(stage, setting, recorder)
    written = {node.meta.get("writes") for node in stage.nodes}  # a model may write into its inputs itself
    recorder.protect([tensor for node, tensor in zip(stage.inputs, inputs, strict=True) if node.name not in written])
    with autograd_functions_wrapped(_by_operators(stage, package)), _without_fused_attention():
        outputs = module(*inputs)
    return StageResult.read(recorder, outputs if isinstance(outputs, (tuple, list)) else [outputs], state.tensors)


@contextmanager
def _without_fused_attention() -> Iterator[None]:
    """Let attention of torch run its operations in evaluation mode, as while it is traced.

    It has one operation for all of them where no tensor requires a gradient, as in frozen layers.
    """
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_enabled)


def _by_operators(stage: StageGraph, package: str) -> ApplyFunction:
    """Apply the Functions of a package by the operators that the captured graph has for those of the model."""
    of_model = {applied.function.__name__: applied.function for applied in applied_functions(stage.nodes)}

    def apply(function: type, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.__name__ in of_model and function.__module__.partition(".")[0] == package:
            return apply_written(of_model[function.__name__], function, args)
        return apply(*args, **kwargs)

    return apply


def check_state(captured: Captured, stage: StageGraph, module: nn.Module) -> None:
    """Check that a stage has the parameters, buffers and constants of the captured one.

    Raises:
        WrongStateError: one is missing, has another shape, or is unknown to the model.
    """
    tensors: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for fqn in stage.state:
        entry, tensor = captured.state[fqn], tensors.pop(fqn, None)
        if tensor is None:
            raise WrongStateError(f"{fqn} is missing")
        if tuple(tensor.shape) != entry.shape:
            raise WrongStateError(f"{fqn} is {list(tensor.shape)}, and {list(entry.shape)} in the model")
        if isinstance(tensor, nn.Parameter) != (entry.kind == "parameter"):
            raise WrongStateError(f"{fqn} is a {type(tensor).__name__}, and a {entry.kind} in the model")
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad != entry.requires_grad:
            raise WrongStateError(f"{fqn}.requires_grad is {tensor.requires_grad}")
        owner, _, name = fqn.rpartition(".")
        if entry.kind == "buffer" and is_persistent(module.get_submodule(owner), name) != entry.persistent:
            raise WrongStateError(f"{fqn} is {'persistent' if not entry.persistent else 'not persistent'}")
    if tensors:
        raise WrongStateError(f"the stage has {', '.join(tensors)}, which the model has not")


def _forward_once(
    module: nn.Module, forward: Callable[..., Any], recorder: TermRecorder, calls: RepeatedCalls
) -> Callable[..., Any]:
    """The ``forward`` of a module, which is run once for all modules of equal code and settings."""
    code = _code(module)

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple(None if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        state = [*module.parameters(), *module.buffers()]
        code_of_call = code, str(form), constants
        return calls.run(recorder, code_of_call, [*inputs, *state], lambda: forward(*args, **kwargs))

    return run


def _code(module: nn.Module) -> Hashable:
    """What two modules have alike that compute the same of their arguments and state."""
    parts = []
    for name, inner in module.named_modules():
        plain = {key: value for key, value in vars(inner).items() if not key.startswith("_") and key != "forward"}
        parts.append((name, type(inner), repr(sorted(plain.items(), key=lambda item: item[0]))))
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    places: dict[int, int] = {}
    names = tuple((name, places.setdefault(id(tensor), len(places))) for name, tensor in tensors)
    return tuple(parts), names
