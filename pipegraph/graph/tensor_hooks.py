"""Hooks that a forward adds to tensors: a graph has for each a ``torch.autograd.Function`` with the hook as backward.

    model: h.register_hook(halve)  ─▶  graph: h = apply_HalveHook_0(h)  ─▶  stage: h = HalveHook.apply(h)

``torch.export`` leaves no trace of a hook. While a model is exported, ``register_hook`` calls an operator that marks
the place, and the Function stands there once the graph is flat.
"""

from __future__ import annotations

import ast
import linecache
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pipegraph.errors import CaptureError, one_line
from pipegraph.graph.aliasing import is_stable
from pipegraph.graph.calls import VariablePlace
from pipegraph.graph.custom_functions import AppliedFunction, applied_function, operator_of_function
from pipegraph.graph.function_text import FunctionText, NotPortableError, function_text
from pipegraph.graph.function_trials import (
    DrawsFixed,
    Samples,
    UnwritableFunctionError,
    arriving_gradient,
    gradients,
    run_on_samples,
)
from pipegraph.graph.nodes import SIZES, path_of, source_line, source_lines
from pipegraph.torch_private.export import call_name, replaced
from pipegraph.torch_private.operators import OpOverload
from pipegraph.torch_private.symbolic_shapes import number_of

MENTIONS_HOOKS: Final = re.compile(r"\bregister_hook\b")
"""In the source of a model that may add hooks to tensors."""
NAMESPACE: Final = "pipegraph_hooks"
"""The namespace of the operators that mark hooks. They compute nothing."""
HOOK_ADVICE: Final = (
    "a hook of torch, tensors and plain numbers alone, which returns the new gradient; or the same "
    "arithmetic in forward: h = h * 0.5 + (h * 0.5).detach() halves a gradient."
)
_RESERVED: Final = ("ctx", "x", "gradient")
"""The variables of a Function."""


class TensorHookError(UnwritableFunctionError):
    """A stage cannot have a hook that a forward adds to a tensor."""


@dataclass(frozen=True)
class _TensorHook:
    """A hook of a tensor.

    Attributes:
        name: of the function; empty for a lambda.
        text: of the function, with numbers in the place of what it reads.
        arguments: the names of the tensors and numbers in it, each with its type in the schema of an operator.
        functions: the functions of the model in it.
        file: that it is from.
    """

    name: str
    text: str
    arguments: tuple[tuple[str, str], ...]
    functions: tuple[FunctionType, ...]
    file: str

    @property
    def class_name(self) -> str:
        """``ClipGradientHook`` for ``clip_gradient``."""
        words = "".join(word[:1].upper() + word[1:] for word in self.name.split("_")) or "Gradient"
        return words if words.endswith("Hook") else f"{words}Hook"

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the arguments of its Function."""
        return ("Tensor", *(kind for _, kind in self.arguments))


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_markers: dict[_TensorHook, OpOverload] = {}
_hooks: dict[object, _TensorHook] = {}
_functions: dict[tuple[_TensorHook, str], type] = {}
_hook_of: dict[object, _TensorHook] = {}


class _Handle:
    """The handle of a hook while a model is exported."""

    def remove(self) -> None:
        raise TensorHookError("its forward removes a hook from a tensor")


# ---- the model runs --------------------------------------------------------------------------------------------------


@contextmanager
def hooks_marked() -> Iterator[None]:
    """Let ``Tensor.register_hook`` call an operator that marks the place in a graph.

    Raises:
        TensorHookError: a stage cannot have the hook.
    """

    def mark(original: Callable[..., Any], tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        if not tensor.requires_grad:
            # Without gradients a model runs for its shapes, or its lines, alone.
            return original(tensor, hook) if torch.is_grad_enabled() else _Handle()
        described, values = _described(hook)
        _try(described, [tensor, *values])
        _marker(described)(tensor, *values)
        return _Handle()

    with replaced(torch.Tensor, "register_hook", mark):
        yield


@contextmanager
def hooks_left_out() -> Iterator[None]:
    """Let ``Tensor.register_hook`` do nothing, while a model runs for something that hooks do not change."""
    with replaced(torch.Tensor, "register_hook", lambda original, tensor, hook: _Handle()):
        yield


def _described(hook: Callable[[Tensor], Any]) -> tuple[_TensorHook, list[Tensor | float]]:
    """A hook, and the tensors and numbers that it reads.

    Raises:
        TensorHookError: it needs something that a stage does not have.
    """
    try:
        text = function_text(hook, is_of_class=True)
    except NotPortableError as error:
        raise TensorHookError(
            f"{_kind(getattr(hook, '__name__', ''))} cannot be written into a stage: {error}"
        ) from None
    names = _argument_names(text)
    values: dict[str, tuple[Tensor | float, str]] = {**text.tensors, **text.numbers}
    written = re.sub(r"\b_(?:tensor|number)_\d+\b", lambda match: names[match[0]], text.text)
    arguments = tuple((names[key], _TYPES.get(type(value), "Tensor")) for key, (value, _) in values.items())
    return _TensorHook(text.name, written, arguments, (*text.functions.values(),), text.file), [
        value for value, _ in values.values()
    ]


_TYPES: Final[Mapping[type, str]] = {bool: "bool", int: "SymInt", float: "float"}


def _argument_names(text: FunctionText) -> dict[str, str]:
    """The names that a Function has for tensors and numbers: those of the source, if nothing else has them."""
    names: dict[str, str] = {}
    for key, (_, source) in (*text.tensors.items(), *text.numbers.items()):
        is_used = re.search(rf"\b{re.escape(source)}\b", text.text) or source in {*names.values(), *_RESERVED}
        names[key] = source if source.isidentifier() and not is_used else key.lstrip("_")
    return names


def _kind(name: str) -> str:
    """How messages name a hook."""
    return "a hook of a tensor" if name in ("", "<lambda>") else f"the hook {one_line(name)} of a tensor"


def _try(hook: _TensorHook, values: Sequence[Tensor | float]) -> None:
    """Run a hook on random gradients. Raises TensorHookError."""
    function: Any = _function(hook, hook.class_name)

    def run(samples: Samples) -> str:
        arguments = samples(1.0)
        output: Tensor = function.apply(*arguments)
        arriving = arriving_gradient(output)
        copy = arriving.clone()
        with DrawsFixed() as draws:
            gradient = gradients(output, arguments[:1], [arriving])[0]
        if draws.any:
            return "draws random numbers"
        if not torch.equal(arriving, copy):
            return "writes into the gradient"
        return "returns no gradient" if gradient is None else ""

    shapes = [[*map(number_of, value.shape)] if isinstance(value, Tensor) else [] for value in values]
    try:
        problem = run_on_samples(function, values, shapes, run)
    except UnwritableFunctionError as error:
        raise TensorHookError(str(error)) from None
    if problem:
        raise TensorHookError(f"{_kind(hook.name)} {problem}")


def _marker(hook: _TensorHook) -> OpOverload:
    """The operator that marks a hook. It writes into the tensor, or else ``torch.export`` would leave it out."""
    if hook not in _markers:
        name = f"hook_{len(_markers)}"
        arguments = "".join(f", {kind} x{position}" for position, (_, kind) in enumerate(hook.arguments))
        _library.define(f"{name}(Tensor(a!) x{arguments}) -> ()")
        _library.impl(name, _no_result, "CompositeExplicitAutograd")
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _no_result, lib=_library)
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        _markers[hook], _hooks[operator] = operator, hook
    return _markers[hook]


def _no_result(*_: Any) -> None:
    """What an operator that marks a hook computes."""


# ---- the Function ----------------------------------------------------------------------------------------------------


def file_of_hook(function: object) -> str | None:
    """The file of the hook that is the backward of a Function; None for a Function of the model."""
    hook = _hook_of.get(function)
    return None if hook is None else hook.file


def names_read_by_hook(target: object) -> tuple[str, ...]:
    """The names of the tensors and numbers that a hook reads, whose Function an operator applies; none for others."""
    applied = applied_function(target)
    hook = None if applied is None else _hook_of.get(applied.function)
    return () if hook is None else tuple(name for name, _ in hook.arguments)


def _function(hook: _TensorHook, name: str) -> Any:
    """The Function of a hook."""
    if (hook, name) not in _functions:
        text = _function_text(hook, name)
        file = f"<hook {len(_functions)}: {name}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        namespace: dict[str, Any] = {"__name__": __name__, "torch": torch, "math": math, "nn": nn, "F": F}
        namespace |= {function.__name__: function for function in hook.functions}
        exec(compile(text, file, "exec"), namespace)
        _functions[hook, name] = namespace[name]
        _hook_of[namespace[name]] = hook
    return _functions[hook, name]


def _function_text(hook: _TensorHook, name: str) -> str:
    """The source of the Function of a hook."""
    definition = ast.parse(hook.text).body[0]
    parameter, statements = _body(hook, definition)
    tensors = [argument for argument, kind in hook.arguments if kind == "Tensor"]
    results = ", None" * len(hook.arguments)
    saved = f"({tensors[0]},)" if len(tensors) == 1 else ", ".join(tensors)
    lines = [
        f"class {name}(torch.autograd.Function):",
        "    @staticmethod",
        f"    def forward({', '.join(('ctx', 'x', *(argument for argument, _ in hook.arguments)))}):",
        *([f"        ctx.save_for_backward({', '.join(tensors)})"] if tensors else []),
        *(f"        ctx.{number} = {number}" for number in _numbers(hook)),
        "        return x.view_as(x)",
        "",
        "    @staticmethod",
        f"    def backward(ctx, {parameter}):",
        *([f"        {saved} = ctx.saved_tensors"] if tensors else []),
        *(f"        {line}" if line else "" for line in statements[:-1]),
        f"        return {statements[-1]}{results}",
    ]
    return "\n".join(lines) + "\n"


def _body(hook: _TensorHook, definition: ast.stmt) -> tuple[str, list[str]]:
    """The parameter of the backward, and its statements; the last is the expression that it returns."""
    function = definition.value if isinstance(definition, ast.Expr) else definition
    assert isinstance(function, (ast.Lambda, ast.FunctionDef))
    returned = function.body
    if isinstance(returned, list) and len(returned) == 1 and isinstance(returned[0], ast.Return):
        returned = returned[0].value or returned
    parameter = next((argument.arg for argument in function.args.args), "")
    segment = None if isinstance(returned, list) else ast.get_source_segment(hook.text, returned)
    if segment is not None and "\n" not in segment and parameter != "ctx":
        for number in _numbers(hook):
            segment = re.sub(rf"\b{number}\b", f"ctx.{number}", segment)  # nothing else in it has that name
        return parameter, [segment]
    read = [f"{number} = ctx.{number}" for number in _numbers(hook)]
    if not hook.name:
        return "gradient", [*read, f"({hook.text})(gradient)"]
    blank = [""] if hook.arguments else []  # as formatters have it
    return "gradient", [*read, *blank, *hook.text.splitlines(), "", f"{hook.name}(gradient)"]


def _numbers(hook: _TensorHook) -> list[str]:
    return [argument for argument, kind in hook.arguments if kind != "Tensor"]


# ---- the graph -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mark:
    """Where a model added a hook to a tensor, and the values and numbers that the hook reads."""

    hook: _TensorHook
    tensor: fx.Node
    values: tuple[Any, ...]
    marker: fx.Node
    following: fx.Node
    is_read_before: bool


def place_hooks(graph: fx.Graph) -> None:
    """Put the Functions of hooks in the place of the operators that mark them.

    A hook takes the gradient of all that reads the tensor. Its Function stands where the model adds the hook, or right
    after the tensor if something reads that before, or the tensor is another module's.

    Raises:
        CaptureError: the hook is one of a parameter, or its tensor is changed in place.
    """
    marks = list(_marks(graph))
    for mark in marks:
        graph.erase_node(mark.marker)
    names: dict[str, _TensorHook] = {}
    for mark in marks:
        _check(mark)
        name, number = mark.hook.class_name, 1
        while names.setdefault(name, mark.hook) != mark.hook:
            number += 1
            name = f"{mark.hook.class_name}{number}"
        _place(
            graph, mark, AppliedFunction(_function(mark.hook, name), mark.hook.types, (False,) * len(mark.hook.types))
        )


def _marks(graph: fx.Graph) -> Iterator[_Mark]:
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        hook = _hooks.get(node.target)
        if hook is None:
            continue
        tensor, *values = node.args
        following = node.next
        while following.target in _hooks:
            following = following.next
        readers = [user for user in tensor.users if user.target not in _hooks and order[user] < order[node]]
        yield _Mark(hook, tensor, tuple(values), node, following, bool(readers))


def _check(mark: _Mark) -> None:
    """Raise CaptureError if no Function does what a hook does."""
    line = source_line(mark.marker)
    if mark.tensor.op == "get_attr":
        raise CaptureError(
            f"The model adds a hook to the parameter {mark.tensor.target} in each forward.\n  at {line}",
            "register_hook once, outside of forward: stages have the hooks of parameters.",
        )
    if not is_stable(mark.tensor):
        raise CaptureError(
            f"The model adds a hook to a tensor, and writes into the memory of the tensor.\n  at {line}",
            "h = h + x instead of h += x, for the tensor with the hook and for views of it.",
        )


def _place(graph: fx.Graph, mark: _Mark, applied: AppliedFunction) -> None:
    """Insert a Function, and let all that reads the tensor read what it returns."""
    tensor, marker = mark.tensor, mark.marker
    scope = path_of(marker)
    readers = list(tensor.users)
    if mark.is_read_before or path_of(tensor)[: len(scope)] != scope or any(map(_is_hook, readers)):
        if any(isinstance(value, fx.Node) for value in mark.values):
            raise CaptureError(
                "The model adds a hook to a tensor that it has read before, or that another module has computed, and "
                f"the hook reads other tensors.\n  at {source_line(marker)}",
                "h.register_hook right after h is computed.",
            )
        following, scope, functions = _place_after(graph, tensor)
    else:
        following, functions = mark.following, marker.meta["functions"]
    with graph.inserting_before(following):
        node = graph.call_function(operator_of_function(applied), (tensor, *mark.values))
    regions = tuple(region for region in marker.meta["regions"] if region[0] != "grad")  # the gradient is the tensor's
    node.meta = {**marker.meta, "path": scope, "functions": functions, "regions": regions, "val": tensor.meta["val"]}
    if SIZES in tensor.meta:
        node.meta[SIZES] = tensor.meta[SIZES]
    for user in readers:
        user.replace_input_with(tensor, node)
    is_at_marker = following is mark.following
    _move_places(tensor, node, [line for _, line in source_lines(marker)] if is_at_marker else [])


def _is_hook(node: fx.Node) -> bool:
    function = applied_function(node.target)
    return function is not None and function.function in _hook_of


def _place_after(graph: fx.Graph, tensor: fx.Node) -> tuple[fx.Node, tuple[Any, ...], tuple[Any, ...]]:
    """The node after a tensor, and the calls of modules and functions that both are in."""
    following = tensor.next
    while following.op in ("placeholder", "get_attr"):
        following = following.next
    path, functions = (_common(tensor.meta.get(key, ()), following.meta.get(key, ())) for key in ("path", "functions"))
    return following, path, functions


def _common(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    """The entries at the beginning of both."""
    different = (position for position, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    return first[: next(different, min(len(first), len(second)))]


def _move_places(tensor: fx.Node, node: fx.Node, lines: Sequence[int]) -> None:
    """Let what calls of modules were given, and what they returned, be the result of a Function.

    Args:
        lines: that led to the hook; none if the Function stands right after the tensor.
    """
    ended = {call_name(call) for call, _ in path_of(tensor)} - {call_name(call) for call, _ in path_of(node)}
    for key in ("argument_of", "result_of"):
        places: Mapping[str, Any] = tensor.meta.get(key, {})
        moved = {call: place for call, place in places.items() if call not in ended}
        if moved:
            tensor.meta[key] = {call: place for call, place in places.items() if call in ended}
            node.meta[key] = moved
    for call, variables in tensor.meta.get("variables", {}).items():
        node.meta.setdefault("variables", {})[call] = tuple(_at_hook(variable, lines) for variable in variables)


def _at_hook(variable: VariablePlace, lines: Sequence[int]) -> VariablePlace:
    """A variable with the tensor, as one that the statement with the hook assigns."""
    if variable.is_end:
        return variable
    return variable._replace(line=min((line for line in lines if line >= variable.line), default=variable.line))
