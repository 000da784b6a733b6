"""Private interfaces of torch that ``graph/`` uses: one name or function each, with the reason."""

from __future__ import annotations

import inspect
import os
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._decomp import decompositions
from torch._export.utils import _compiling_state_context
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

# The types of a graph's targets, nestings of tensors, and a mode that sees every operation have no public module.
__all__ = ["HigherOrderOperator", "OpOverload", "TorchDispatchMode", "no_dispatch", "pytree"]

# The folders of torch (not torchvision) and pipegraph.
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))

CAPTURE_LOCK = threading.RLock()
"""Held while a model is captured: ``torch.export``, and what `replaced` puts in the place of functions, are of the
whole process. A thread may hold it several times."""

RunModule = Callable[[Any, nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(tracer, module, run, args, kwargs) → the module's result, where ``run(*args, **kwargs)`` runs its ``forward``."""

NameCall = Callable[[Any, types.FrameType], str]
"""(tracer, frame of a function that is running) → the name of its call in stack traces."""

ApplyFunction = Callable[[type, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(function, apply, args, kwargs) → the function's result, where ``apply(*args, **kwargs)`` applies it."""


def operator_name(target: OpOverload) -> tuple[str, str]:
    """(``softmax``, ``int``) of ``aten.softmax.int``; publicly there is only the text of the whole."""
    return target._opname, target._overloadname


def schema_arguments(target: OpOverload) -> Sequence[Any]:
    """The arguments of an operator's schema, each with ``name``, ``alias_info``, ``kwarg_only`` and default."""
    return target._schema.arguments


def is_mutable(target: OpOverload) -> bool:
    """Return whether an operator writes into an argument."""
    return target._schema.is_mutable


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether ``state_dict()`` has a buffer; the public way, to make one, calls hooks of the model."""
    return buffer not in module._non_persistent_buffers_set


def version_of(tensor: torch.Tensor) -> int:
    """A number that rises with every write into a tensor."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made as a view of another; on the meta device no address says so."""
    return tensor._is_view()


def storage_identity(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor while it lives. ``data_ptr`` has none on the meta device."""
    return tensor.untyped_storage()._cdata


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have alike if each write into one is a write into the other at the same place: tied weights."""
    if not tensor.numel():
        return (id(tensor),)
    return storage_identity(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def can_reset_parameters(module: torch.nn.Module) -> bool:
    """Return whether a module initialises what it holds. ``nn.MultiheadAttention`` has no public method for it."""
    return hasattr(module, "reset_parameters") or hasattr(module, "_reset_parameters")


def reset_parameters(module: Any) -> None:
    """Initialise what a module holds, by the method that `can_reset_parameters` finds."""
    module.reset_parameters() if hasattr(module, "reset_parameters") else module._reset_parameters()


def initialise_of_transformers(model: Any, module: torch.nn.Module) -> None:
    """Initialise one module as a model of transformers does. What is public does so for all modules, and then once."""
    model._init_weights(module)


def values_of(tensor: torch.Tensor) -> bytes | None:
    """The values of a tensor, also while a mode without memory is active; None if it has none.

    ``no_dispatch``: the mode would run the reading of memory as an operation on a fake tensor.
    """
    if tensor.is_meta or fake_mode_of(tensor) is not None:
        return None
    with no_dispatch():
        return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def new_fake_mode() -> FakeTensorMode:
    """A mode whose tensors say a device and hold no memory.

    ``FakeTensorMode`` and ``ShapeEnv`` have no public constructor, though ``torch.export`` documents fake tensors as
    inputs; the meta device would lose the values of tensors that ``forward`` makes.
    """
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fake_mode_of(tensor: torch.Tensor) -> FakeTensorMode | None:
    """The mode of a fake tensor; None for any other. ``FakeTensor`` is not a public class."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def fake_empty(
    like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """An empty fake tensor on the device and in the mode of another one."""
    mode = fake_mode_of(like)
    assert mode is not None
    with mode:
        if strides is not None:
            return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=like.device)
        return torch.empty(tuple(shape), dtype=dtype, device=like.device)


def symbolic_expression(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """The expression of a symbolic number of ``torch.export``; publicly there is only its text."""
    return value.node.expr


def guards_of(tensor: torch.Tensor) -> list[sympy.Basic]:
    """What ``torch.export`` took for granted of the sizes of a program, as the example has it: ``s27 <= 64``.

    Publicly a program names only the range of each size. A symbol that turned out to be a number or another symbol is
    replaced. What was only asked about the layout of memory (in ``_prims_common``) is left out.
    """
    mode = fake_mode_of(tensor)
    if mode is None or mode.shape_env is None:
        return []
    guards = (guard for guard in mode.shape_env.guards if "_prims_common" not in str(guard.sloc.framework_loc))
    return [mode.shape_env.replace(guard.expr) for guard in guards]


def exporting() -> AbstractContextManager[Any]:
    """A context in which ``torch.compiler.is_exporting()`` holds, as it does in ``torch.export``.

    ``_compiling_state_context``: nothing public sets the flag, and a model may ask for it.
    """
    return _compiling_state_context()


@contextmanager
def module_calls_wrapped(wrapper: RunModule, name_of: NameCall) -> Iterator[None]:
    """Let ``wrapper`` run every module that ``torch.export`` traces in this thread, and keep in the stack traces of
    operations the lines of functions that a ``forward`` calls, under the names that ``name_of`` gives their calls.

    ``_ModuleStackTracer.call_module``: ``fx.Tracer`` documents the method for custom tracers, which
    ``torch.export`` does not take. Hooks on modules, the public way, change what some of them do
    (``nn.TransformerEncoderLayer`` asks for them), and global hooks do not get keyword arguments before the call.
    ``_filter_traceback_frames`` of the same tracer "can be overridden to customize the frame filtering logic"; by
    itself it keeps only the frames of ``forward`` methods.
    """

    def call_module(
        original: Callable[..., Any],
        tracer: _ModuleStackTracer,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if "_filter_traceback_frames" not in vars(tracer):
            of_torch = tracer._filter_traceback_frames
            vars(tracer)["_filter_traceback_frames"] = lambda frames: _with_helpers(
                frames, of_torch(frames), partial(name_of, tracer)
            )

        def run(*args: Any, **kwargs: Any) -> Any:
            return wrapper(tracer, module, forward, args, kwargs)

        return original(tracer, module, run, args, kwargs)

    with replaced(_ModuleStackTracer, "call_module", call_module):
        yield


def _with_helpers(
    frames: traceback.StackSummary, torch_frames: traceback.StackSummary, name_of: Callable[[types.FrameType], str]
) -> traceback.StackSummary:
    """The frames that torch keeps, and those of others that they call, under other names."""
    places = {(frame.filename, frame.lineno) for frame in torch_frames}
    first = next((place for place, frame in enumerate(frames) if (frame.filename, frame.lineno) in places), len(frames))
    running = _frames_outside(inspect.currentframe())
    named = []
    for frame in frames[first:]:
        if (frame.filename, frame.lineno) in places:
            named.append(frame)
        elif not frame.filename.startswith(_LIBRARIES):
            place = (frame.filename, frame.lineno, frame.name)
            live_frame = next((candidate for candidate in running if _place_of(candidate) == place), None)
            name = name_of(live_frame) if live_frame is not None else frame.name
            named.append(traceback.FrameSummary(frame.filename, frame.lineno, name, line=frame.line))
    return traceback.StackSummary.from_list(named)


def _frames_outside(innermost: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frames that led to one, outermost first, without it: a frame that holds itself keeps its tensors alive."""
    frames = []
    frame = innermost.f_back if innermost is not None else None
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return reversed(frames)


def _place_of(frame: types.FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def call_name(recorded: str) -> str:
    """The name of a call without the root that the tracer and the exported graph put first, each its own."""
    return recorded.removeprefix("_export_root").removeprefix("L__self__").lstrip(".")


def current_call(tracer: Any) -> str:
    """The innermost call of a module that ``torch.export`` traces: ``layers.0``, ``layers.0@1`` for the second one."""
    return next(reversed(tracer.module_stack), "")


def traced_node(tracer: Any, tensor: torch.Tensor) -> fx.Node | None:
    """The node of a tensor while ``torch.export`` traces; None for a tensor that is neither the result of an operation
    nor an argument of the model. Only the private ``get_proxy_slot`` returns it."""
    proxy = getattr(get_proxy_slot(tensor, tracer, None), "proxy", None)
    return None if proxy is None else proxy.node


@contextmanager
def autograd_functions_wrapped(wrapper: ApplyFunction) -> Iterator[None]:
    """Let ``wrapper`` apply every ``torch.autograd.Function`` that is applied in this thread.

    ``torch.export`` leaves no trace of one in a graph, and no mode of torch sees ``autograd.Function.apply``.
    """

    def apply(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        return wrapper(cls, partial(original, cls), args, kwargs)

    with replaced(torch.autograd.Function, "apply", apply):
        yield


@contextmanager
def recurrent_layers_without_steps() -> Iterator[None]:
    """Let an LSTM, GRU or RNN on fake tensors make results of the right shapes, and no step.

    torch takes one after the other, in Python, which fixes their number. A graph has such a layer as one operation.
    """

    def sequence(inputs: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """A state for each step, ``[step, batch, state]``, with a gradient for whatever has one."""
        return torch.nn.functional.linear(inputs, weight.narrow(0, 0, state.shape[-1])) + state

    def lstm(original: Callable[..., Any], inputs: Any, states: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        outputs, cells = (sequence(inputs, weights[0], state) for state in states)
        return outputs, (outputs[-1], cells[-1])

    def rnn(original: Callable[..., Any], inputs: Any, state: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = sequence(inputs, weights[0], state)
        return outputs, outputs[-1]

    with replaced(decompositions, "one_layer_lstm", lstm), replaced(decompositions, "one_layer_rnn", rnn):
        yield


@contextmanager
def replaced(owner: object, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Let ``replacement(original, *arguments)`` stand for a method of a class or function of a module, in this thread.

    Another thread that wants to replace a method waits, so that they are put back in the reverse order. Within a
    thread replacements nest.
    """
    with CAPTURE_LOCK:
        attribute = vars(owner)[name]
        is_classmethod = isinstance(attribute, (classmethod, types.ClassMethodDescriptorType))
        original = _function_of(attribute)
        thread = threading.get_ident()

        def method(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            return replacement(original, *args, **kwargs)

        method.__dict__.update(getattr(original, "__dict__", {}))  # torch clears the caches of some
        setattr(owner, name, classmethod(method) if is_classmethod else method)
        try:
            yield
        finally:
            setattr(owner, name, attribute)


def _function_of(attribute: Any) -> Callable[..., Any]:
    """The function of an attribute of a class, which takes self or cls. From torch 2.15 on ``apply`` is in C."""
    if isinstance(attribute, classmethod):
        return attribute.__func__
    if isinstance(attribute, types.ClassMethodDescriptorType):
        return lambda cls, *args, **kwargs: attribute.__get__(None, cls)(*args, **kwargs)
    function: Callable[..., Any] = attribute
    return function


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether calling a module does more than its ``forward``.

    The dictionaries of hooks are private. The public interface only adds and removes hooks.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hooks_of(tensor: torch.Tensor) -> list[tuple[str, Callable[..., Any]]]:
    """The hooks of a tensor's gradient, with the methods that register them. The public interface has no list of them.

    In the order in which autograd calls them.
    """
    kinds: dict[str, dict[int, Any] | None] = {
        "register_hook": tensor._backward_hooks,
        "register_post_accumulate_grad_hook": tensor._post_accumulate_grad_hooks,
    }
    return [(method, hook) for method, hooks in kinds.items() for hook in (hooks or {}).values()]


def backward_hooks_of(module: nn.Module) -> list[tuple[str, Callable[..., Any]]]:
    """The hooks of the backward of a module, with the methods that register them. Torch has no public list of them."""
    method = "register_full_backward_hook" if module._is_full_backward_hook else "register_backward_hook"
    pre_hooks = [("register_full_backward_pre_hook", hook) for hook in module._backward_pre_hooks.values()]
    return pre_hooks + [(method, hook) for hook in module._backward_hooks.values()]
