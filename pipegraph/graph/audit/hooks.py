"""Hooks that a model has when it is captured: those of a forward run while it is traced, and are in its graph.

Those of gradients become text of the stage.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipegraph.device import Device
from pipegraph.errors import CaptureError, path_from_here
from pipegraph.graph.captured import GradientHook, StateEntry
from pipegraph.graph.function_text import FunctionText, NotPortableError, function_text
from pipegraph.torch_private.modules import backward_hooks_of
from pipegraph.torch_private.tensors import hooks_of, memory_of, version_of

_LARGEST: Final = 2**24
"""The number of elements up to which a hook is tried on a gradient."""
_TRIED: Final = (4, 6)
"""The shape of the gradient on which a hook of a module is tried."""


class _Hook(NamedTuple):
    """A hook of a model, and the parameter or module that has it."""

    owner: str
    target: nn.Parameter | nn.Module
    method: str
    function: Callable[..., Any]


def check_hooks(model: nn.Module) -> None:
    """Check that stages can have the hooks of a model.

    Raises:
        CaptureError: a hook needs more than torch, or is one of a module's backward that depends on the microbatch.
    """
    for hook in _hooks(model):
        _text(model, hook)


def gradient_hooks(
    model: nn.Module, state: dict[str, StateEntry], tensors: dict[str, Tensor]
) -> tuple[GradientHook, ...]:
    """Return the hooks of gradients of a model.

    Args:
        state, tensors: of the model. Tensors that only hooks read are added to them.
    """
    hooks: list[GradientHook] = []
    for hook in _hooks(model):
        text = _text(model, hook)
        names = {key: _name_of(tensor, source, state, tensors) for key, (tensor, source) in text.tensors.items()}
        line = _line_of(hook.function)
        hooks.append(GradientHook(hook.owner, hook.method, text.name, text.text, names, text.libraries, line))
    return tuple(hooks)


def _hooks(model: nn.Module) -> Iterator[_Hook]:
    for name, parameter in model.named_parameters():
        for method, function in hooks_of(parameter):
            yield _Hook(name, parameter, method, function)
    for name, module in model.named_modules():
        for method, function in backward_hooks_of(module):
            yield _Hook(name, module, method, function)


def _name_of(tensor: Tensor, source: str, state: dict[str, StateEntry], tensors: dict[str, Tensor]) -> str:
    """The FQN of a tensor that a hook reads; a new one, at the top of the model, if the model does not have it."""
    memory = memory_of(tensor)
    existing_name = next((fqn for fqn, candidate in tensors.items() if memory_of(candidate) == memory), None)
    if existing_name is not None:
        return existing_name
    fqn = _unused(source, {name.partition(".")[0] for name in state})
    state[fqn] = StateEntry(
        fqn=fqn,
        kind="constant",
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        requires_grad=False,
        persistent=False,
        canonical=fqn,
    )
    tensors[fqn] = tensor.detach()
    return fqn


def _unused(name: str, names: Container[str]) -> str:
    """``keep``, or ``keep_1`` if there is one."""
    reserved = {*dir(nn.Module()), "self"}
    candidate, number = name, 0
    while candidate in names or candidate in reserved:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _text(model: nn.Module, hook: _Hook) -> FunctionText:
    """The text of a hook. Raises CaptureError if a stage could not have it."""
    try:
        text = function_text(hook.function)
        if isinstance(hook.target, nn.Parameter):
            _try_on_parameter(hook.target, hook.method, hook.function, text)
        else:
            _check_module(hook.owner, hook.method)
            _try_on_module(hook.target, hook.method, hook.function, text)
    except NotPortableError as error:
        raise _refusal(model, hook, str(error)) from None
    return text


def _compiled(text: FunctionText) -> Callable[..., Any]:
    """The function that a text defines."""
    names: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "math": math}
    names |= {name: tensor for name, (tensor, _) in text.tensors.items()}
    exec(text.text if text.name else f"hook = {text.text}", names)
    return names[text.name or "hook"]


# ---- parameters ------------------------------------------------------------------------------------------------------


def _try_on_parameter(parameter: nn.Parameter, method: str, hook: Callable[..., Any], text: FunctionText) -> None:
    """Call a hook and its text on a gradient. Raises NotPortableError if they differ, or a call does more than that."""
    if parameter.is_meta or parameter.numel() > _LARGEST:
        return
    read = [tensor for tensor, _ in text.tensors.values()]
    versions = [version_of(tensor) for tensor in read]
    results = []
    with Device(parameter.device).fork_rng(), torch.no_grad():
        gradient = torch.randn_like(parameter)
        for seed, function in enumerate((hook, hook, _compiled(text))):
            torch.manual_seed(seed)
            results.append(_gradient_after(parameter, method, function, gradient.clone()).nan_to_num())
    if [version_of(tensor) for tensor in read] != versions:
        raise NotPortableError("it changes a tensor that it reads")
    if not all(torch.equal(results[0], result) for result in results[1:]):
        raise NotPortableError("each call of it computes something else")


def _gradient_after(parameter: nn.Parameter, method: str, hook: Callable[..., Any], gradient: Tensor) -> Tensor:
    """The gradient after a hook."""
    if method == "register_hook":
        result = hook(gradient)
        return gradient if result is None else result
    copy = nn.Parameter(parameter.detach().clone())
    copy.grad = gradient
    hook(copy)
    if copy.grad is None or not torch.equal(copy, parameter):
        raise NotPortableError("it changes the parameter, or takes its gradient away")
    return copy.grad


# ---- modules ---------------------------------------------------------------------------------------------------------


def _check_module(owner: str, method: str) -> None:
    """Raise NotPortableError for a hook that a stage cannot register."""
    if method == "register_backward_hook":
        raise NotPortableError("torch does not define what such a hook gets; register_full_backward_hook is the one")
    if not owner:
        raise NotPortableError("the model itself is cut into stages")


def _try_on_module(module: nn.Module, method: str, hook: Callable[..., Any], text: FunctionText) -> None:
    """Call a hook and its text on gradients. Raises NotPortableError if an element of the result needs other ones."""
    function = _compiled(text)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        input_gradient, output_gradient = torch.randn(_TRIED), torch.randn(_TRIED)
        whole_gradient, written = (
            _module_gradient(module, method, variant, input_gradient, output_gradient) for variant in (hook, function)
        )
        is_equal = torch.equal(whole_gradient, written)
        for dim in range(len(_TRIED)):
            halves = zip(input_gradient.chunk(2, dim), output_gradient.chunk(2, dim), strict=True)
            joined = torch.cat([_module_gradient(module, method, hook, *half) for half in halves], dim)
            is_equal = is_equal and torch.equal(whole_gradient, joined)
    if not is_equal:
        raise NotPortableError("an element of its result depends on others: it gets the gradients of a microbatch")


def _module_gradient(
    module: nn.Module, method: str, hook: Callable[..., Any], input_gradient: Tensor, output_gradient: Tensor
) -> Tensor:
    """The gradient after a hook: of the input, or of the output for a hook that is called before the backward."""
    is_pre = method == "register_full_backward_pre_hook"
    try:
        result = hook(module, (output_gradient,)) if is_pre else hook(module, (input_gradient,), (output_gradient,))
    except NotPortableError:
        raise
    except Exception as error:  # whatever the hook raises on another shape
        raise NotPortableError(f"it takes gradients of one shape alone ({type(error).__name__})") from None
    if result is None:
        return output_gradient if is_pre else input_gradient
    return result if isinstance(result, Tensor) else result[0]


# ---- messages --------------------------------------------------------------------------------------------------------


def _refusal(model: nn.Module, hook: _Hook, reason: str) -> CaptureError:
    if isinstance(hook.target, nn.Parameter):
        subject, place = f"the parameter {hook.owner} has a hook", f'stage.get_parameter("{hook.owner}")'
    else:
        subject = f"{hook.owner or type(model).__name__} has a hook for its backward"
        place = f'stage.get_submodule("{hook.owner}")' if hook.owner else "the module that it is about"
    line = _line_of(hook.function)
    return CaptureError(
        f"{subject}, which a stage would not call: {reason}.{f'{chr(10)}  at {line}' if line else ''}",
        f"the model without it, and the hook on the stages: Pipeline(parallelize_fn=...) gives each one to a "
        f"function, which registers it on {place} where the stage has it.",
    )


def _line_of(hook: Callable[..., Any]) -> str:
    function = inspect.unwrap(getattr(hook, "func", hook))
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return "" if code is None else f"{path_from_here(code.co_filename)}:{code.co_firstlineno}"
