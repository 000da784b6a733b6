"""`torch.export` and its tracer."""

from __future__ import annotations

import os
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._export.passes import replace_set_grad_with_hop_pass
from torch._export.utils import _compiling_state_context
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipegraph.errors import frame_above, is_user_file
from pipegraph.torch_private.fake_tensors import fake_mode_of


@contextmanager
def fixed_sizes_seen(see: Callable[[str, int], None]) -> Iterator[None]:
    """Call ``see`` when an export fixes a size of an input that might vary, while the code that fixes it runs.

    torch says which sizes are fixed, but not by which line of the model; the line that it logs is in torch.

    Args:
        see: takes the size as torch names it, ``L['tokens'].size()[1]``, and its value. ``int`` of an expression of
            sizes fixes the expression, which stands for its name.
    """

    def replace(
        original: Callable[..., None], env: ShapeEnv, symbol: sympy.Symbol, to: sympy.Expr, reason: str
    ) -> None:
        if to.is_Integer:
            for source in env.var_to_sources.get(symbol, ()):
                see(_name(source), int(to))
        original(env, symbol, to, reason)

    def whole_number(original: Callable[[torch.SymInt], int], value: torch.SymInt) -> int:
        expression = symbolic_expression(value)
        number = original(value)
        if expression.free_symbols and not expression.is_Symbol:
            see(str(expression), number)
        return number

    with replaced(ShapeEnv, "_set_replacement", replace), replaced(torch.SymInt, "__int__", whole_number):
        yield


@contextmanager
def size_expressions_seen(see: Callable[[sympy.Basic, Callable[[sympy.Basic], list[str]]], None]) -> Iterator[None]:
    """Call ``see`` before an export evaluates a condition on sizes, while the code that needs it runs.

    torch simplifies the expression again at each evaluation, and does not limit its length. torch records guards
    outside of the method that is replaced here, so that it still records the line of the code that needs them.

    Args:
        see: takes the expression, and a function that returns torch's names of the sizes of a symbol.
    """

    def evaluate(original: Callable[..., Any], env: ShapeEnv, expression: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(expression, sympy.Basic):
            see(expression, lambda symbol: [_name(source) for source in env.var_to_sources.get(symbol, ())])
        return original(env, expression, *args, **kwargs)

    with replaced(ShapeEnv, "_maybe_evaluate_static", evaluate):
        yield


def _name(source: Any) -> str:
    name = source.name
    source_name: str = name() if callable(name) else name
    return source_name


# The folders of torch (not torchvision) and pipegraph.
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


CAPTURE_LOCK = threading.RLock()
"""Held while a model is captured: ``torch.export``, and what `replaced` puts in the place of functions, are of the
whole process. A thread may hold it several times."""


RunModule = Callable[[Any, nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(tracer, module, run, args, kwargs) → the module's result, where ``run(*args, **kwargs)`` runs its ``forward``."""


ApplyFunction = Callable[[type, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(function, apply, args, kwargs) → the function's result, where ``apply(*args, **kwargs)`` applies it."""


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


def export_hidden() -> AbstractContextManager[None]:
    """Let ``torch.compiler.is_exporting()`` hold for torch alone: what else asks is told that nothing is exported.

    The function is public, and a model asks it for operations that other formats can express. Such a model is not the
    one that is trained.
    """

    def answer(original: Callable[[], bool]) -> bool:
        caller = frame_above(2)
        return not (caller and is_user_file(caller.f_code.co_filename)) and original()

    return replaced(torch.compiler, "is_exporting", answer)


@contextmanager
def module_calls_wrapped(wrapper: RunModule) -> Iterator[None]:
    """Let ``wrapper`` run every module that ``torch.export`` traces in this thread, and keep in the stack traces of
    operations the lines of functions that a ``forward`` calls.

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
            vars(tracer)["_filter_traceback_frames"] = lambda frames: _with_helpers(frames, of_torch(frames))

        def run(*args: Any, **kwargs: Any) -> Any:
            return wrapper(tracer, module, forward, args, kwargs)

        return original(tracer, module, run, args, kwargs)

    with replaced(_ModuleStackTracer, "call_module", call_module):
        yield


def _with_helpers(frames: traceback.StackSummary, torch_frames: traceback.StackSummary) -> traceback.StackSummary:
    """The frames that torch keeps, and those of the model's functions that they call."""
    places = {(frame.filename, frame.lineno) for frame in torch_frames}
    first = next((place for place, frame in enumerate(frames) if (frame.filename, frame.lineno) in places), len(frames))
    return traceback.StackSummary.from_list(
        frame
        for frame in frames[first:]
        if (frame.filename, frame.lineno) in places or not frame.filename.startswith(_LIBRARIES)
    )


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

    ``torch.export`` leaves no trace of one in a graph, and no mode of torch sees ``autograd.Function.apply``. A model
    may have ``Round.apply`` from before, as in ``round = Round.apply``. Of such a call the ``forward`` is replaced.
    """

    def apply(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        return wrapper(cls, partial(apply_function, cls), args, kwargs)

    with replaced(torch.autograd.Function, "apply", apply), ExitStack() as stack:
        for function in _subclasses(torch.autograd.Function):
            if function.__module__.split(".")[0] != "torch":
                stack.enter_context(_forward_wrapped(function, wrapper))
        yield


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    subclass: type[Any]
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


@contextmanager
def _forward_wrapped(function: Any, wrapper: ApplyFunction) -> Iterator[None]:
    """Let ``wrapper`` apply a Function when its ``forward`` is called otherwise than by `apply_function`."""
    attribute, original = vars(function).get("forward"), function.forward
    takes_context = function.setup_context is torch.autograd.Function.setup_context
    thread = threading.get_ident()

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or _applied.function is function:
            _applied.function = None
            return original(*args, **kwargs)
        context = args[:1] if takes_context else ()
        return wrapper(function, partial(original, *context), args[len(context) :], kwargs)

    function.forward = staticmethod(forward)
    try:
        yield
    finally:
        if attribute is None:
            del function.forward
        else:
            function.forward = attribute


class _Applied(threading.local):
    """The Function that `apply_function` applies, until its ``forward`` runs."""

    function: type | None = None


_applied = _Applied()


def apply_function(function: type, *args: Any, **kwargs: Any) -> Any:
    """Apply a ``torch.autograd.Function``, also within `autograd_functions_wrapped`."""
    previous, _applied.function = _applied.function, function
    try:
        return _APPLY(function, *args, **kwargs)
    finally:
        _applied.function = previous


GRAD_ENABLED = "grad_enabled"
"""Key of the metadata of an exported node: whether gradients were on when it ran."""


@contextmanager
def grad_modes_marked() -> Iterator[None]:
    """Let ``meta[GRAD_ENABLED]`` of each exported operation say whether gradients were on when it ran.

    ``torch.export`` keeps a block of ``no_grad`` as a separate graph, but not if it is inside of an autocast block: the
    operations are there, and the mode is lost. Its pass for these blocks reads the calls that switch gradients, so
    that the marks are made before it.
    """

    def mark(original: Callable[..., Any], module: fx.GraphModule, *args: Any) -> Any:
        enabled = torch.is_grad_enabled()
        for node in module.graph.nodes:
            if node.target is torch._C._set_grad_enabled:
                enabled = bool(node.args[0])
            elif node.op == "call_function":
                node.meta[GRAD_ENABLED] = enabled
        return original(module, *args)

    with replaced(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", mark):
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


_APPLY = _function_of(vars(torch.autograd.Function)["apply"])
