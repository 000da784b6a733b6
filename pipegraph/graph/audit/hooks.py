"""Hooks that a model has when it is captured: those of a forward run while it is traced, and are in its graph.

Those of gradients become text of the stage.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pipegraph.device import Device
from pipegraph.errors import CaptureError, one_line, path_from_here
from pipegraph.graph.captured import GradientHook, StateEntry
from pipegraph.graph.function_text import FunctionText, NotPortableError, function_text
from pipegraph.graph.nodes import path_of
from pipegraph.torch_private.fake_tensors import TorchDispatchMode
from pipegraph.torch_private.modules import backward_hooks_of
from pipegraph.torch_private.tensors import hooks_of, memory_of, version_of

_TRIED: Final = (4, 6)
"""The shape of the gradient on which a hook of a module is tried."""


_COUNTS: Final = (1, 2, 3)
"""The numbers of inputs and outputs with which a hook of a module is tried."""


class HookError(NotPortableError):
    """A hook raises an error for the gradients that it was given."""


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
    model: nn.Module, graph: fx.Graph, state: dict[str, StateEntry], tensors: dict[str, Tensor]
) -> tuple[GradientHook, ...]:
    """Return the hooks of gradients of a model.

    Args:
        graph: the captured operations.
        state, tensors: of the model. Tensors that only hooks read are added to them.

    Raises:
        CaptureError: no operation runs in a module that has a hook for its backward.
    """
    hooks: list[GradientHook] = []
    called = {fqn for node in graph.nodes for _, fqn in path_of(node)}
    for hook in _hooks(model):
        if isinstance(hook.target, nn.Module) and hook.owner not in called:
            raise _refusal(model, hook, "no operation of the model runs in that module")
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
    state[fqn] = StateEntry.constant(fqn, tensor)
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
            _check_parameter(model, hook.target)
            _try_on_parameter(hook.target, hook.method, hook.function, text)
        else:
            _check_module(model, hook)
            _try_on_module(hook.target, hook.method, hook.function, text)
    except NotPortableError as error:
        raise _refusal(model, hook, str(error)) from None
    return text


def _compiled(text: FunctionText, tensors: Mapping[str, Tensor] | None = None) -> Callable[..., Any]:
    """The function that a text defines, with its tensors or with other ones."""
    names: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "math": math}
    names |= {name: tensor for name, (tensor, _) in text.tensors.items()} if tensors is None else tensors
    exec(text.text if text.name else f"hook = {text.text}", names)
    return names[text.name or "hook"]


@contextmanager
def _unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context in which hooks are called: what they change is put back.

    Raises:
        NotPortableError: a hook changes one of the tensors; `HookError`: it raises an error.
    """
    versions = [version_of(tensor) for tensor in tensors]
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    except NotPortableError:
        raise
    except Exception as error:  # whatever a hook raises
        problem = one_line(f"{type(error).__name__}: {error}")
        raise HookError(f"called with a gradient of random numbers, it raises {problem}") from None
    finally:
        is_changed = [version_of(tensor) for tensor in tensors] != versions
        with torch.no_grad():
            for tensor, version, original in zip(tensors, versions, copies, strict=True):
                if version_of(tensor) != version:
                    tensor.detach().copy_(original)
    if is_changed:
        raise NotPortableError("it changes a tensor that it reads")


# ---- parameters ------------------------------------------------------------------------------------------------------


def _check_parameter(model: nn.Module, parameter: nn.Parameter) -> None:
    """Raise NotPortableError for a parameter whose gradient in a stage is not the one that the hook gets."""
    if not parameter.requires_grad:
        raise NotPortableError("the parameter has no gradient: requires_grad is False")
    memory = memory_of(parameter)
    if Counter(memory_of(other) for other in model.parameters())[memory] > 1:
        raise NotPortableError("several parameters have its memory, and one gradient in a stage")


def _try_on_parameter(parameter: nn.Parameter, method: str, hook: Callable[..., Any], text: FunctionText) -> None:
    """Call a hook and its text on a gradient. Raises NotPortableError if they differ, or a call does more than that."""
    if parameter.is_meta:
        _try_without_values(parameter, method, text)
        return
    results: list[Tensor] = []
    read = [tensor for tensor, _ in text.tensors.values()]
    with Device(parameter.device).fork_rng(), torch.no_grad(), _unchanged(read):
        gradient = torch.randn_like(parameter)
        for seed, function in enumerate((hook, hook, _compiled(text))):
            torch.manual_seed(seed)
            results.append(_gradient_after(parameter, method, function, gradient.clone()).nan_to_num())
    if not all(torch.equal(results[0], result) for result in results[1:]):
        raise NotPortableError("each call of it computes something else")


def _try_without_values(parameter: nn.Parameter, method: str, text: FunctionText) -> None:
    """The same for a parameter on the meta device, of which only the operations are known."""
    tensors = {name: tensor.detach().to("meta") for name, (tensor, _) in text.tensors.items()}
    versions = [version_of(tensor) for tensor in tensors.values()]
    try:
        with torch.no_grad(), _NoRandomNumbers():
            _gradient_after(parameter, method, _compiled(text, tensors), torch.empty_like(parameter))
    except NotPortableError:
        raise
    except Exception as error:  # whatever a hook raises without values
        problem = one_line(f"{type(error).__name__}: {error}")
        raise NotPortableError(f"it could not be tried on the meta device ({problem})") from None
    if [version_of(tensor) for tensor in tensors.values()] != versions:
        raise NotPortableError("it changes a tensor that it reads")


class _NoRandomNumbers(TorchDispatchMode):
    """Raises NotPortableError for operations that draw random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotPortableError("each call of it computes something else")
        return func(*args, **(kwargs or {}))


def _gradient_after(parameter: nn.Parameter, method: str, hook: Callable[..., Any], gradient: Tensor) -> Tensor:
    """The gradient after a hook."""
    if method == "register_hook":
        result = hook(gradient)
        result = gradient if result is None else result
    else:
        copy = nn.Parameter(parameter.detach().clone())
        copy.grad = gradient
        hook(copy)
        if copy.grad is None or (not copy.is_meta and not torch.equal(copy, parameter)):
            raise NotPortableError("it changes the parameter, or takes its gradient away")
        result = copy.grad
    if (result.shape, result.dtype) != (gradient.shape, gradient.dtype):
        raise NotPortableError(f"it returns {result.dtype} of {[*result.shape]} for a gradient that has another form")
    return result


# ---- modules ---------------------------------------------------------------------------------------------------------


def _check_module(model: nn.Module, hook: _Hook) -> None:
    """Raise NotPortableError for a hook that a stage cannot register."""
    if hook.method == "register_backward_hook":
        raise NotPortableError("torch does not define what such a hook gets; register_full_backward_hook is the one")
    if not hook.owner:
        raise NotPortableError("the model itself is cut into stages")
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is hook.target]
    if len(names) > 1:
        raise NotPortableError(f"the module has several names: {', '.join(names)}")


class _NoAttributes:
    """Stands for the module that a hook is called with: a stage's module may lack attributes of the model's."""

    def __getattr__(self, name: str) -> Any:
        raise NotPortableError(f"it uses the attribute {name} of the module")


def _try_on_module(module: nn.Module, method: str, hook: Callable[..., Any], text: FunctionText) -> None:
    """Call a hook and its text on gradients. Raises NotPortableError if an element of the result needs other ones.

    The number of inputs and outputs of the module is not known here: a hook is tried with several.
    """
    original, written = partial(hook, module), partial(_compiled(text), _NoAttributes())
    read = [tensor for tensor, _ in text.tensors.values()]
    problem: NotPortableError | None = None
    is_tried = False
    for count in _COUNTS:
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), _unchanged(read):
                gradients = [torch.randn(_TRIED) for _ in range(2 * count)]
                results = [_module_gradients(function, method, gradients) for function in (written, original)]
                for dim in range(len(_TRIED)):
                    halves = zip(*(gradient.chunk(2, dim) for gradient in gradients), strict=True)
                    parts = [_module_gradients(original, method, half) for half in halves]
                    results.append([torch.cat(pair, dim) for pair in zip(*parts, strict=True)])
        except HookError as error:
            problem = error
            continue
        is_tried = True
        if not all(map(partial(_are_equal, results[0]), results[1:])):
            raise NotPortableError("an element of its result depends on others: it gets the gradients of a microbatch")
    if problem is not None and not is_tried:
        raise problem


def _module_gradients(hook: Callable[..., Any], method: str, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients after a hook: of the inputs, or of the outputs for a hook that is called before the backward.

    Args:
        gradients: of the inputs, then of the outputs, in equal numbers.
    """
    inputs, outputs = tuple(gradients[: len(gradients) // 2]), tuple(gradients[len(gradients) // 2 :])
    is_pre = method == "register_full_backward_pre_hook"
    result = hook(outputs) if is_pre else hook(inputs, outputs)
    if result is None:
        result = outputs if is_pre else inputs
    return [part for part in (result if isinstance(result, (tuple, list)) else [result]) if part is not None]


def _are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


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
