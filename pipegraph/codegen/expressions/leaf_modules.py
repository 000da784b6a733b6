"""Modules of ``torch.nn`` that come back as themselves: ``nn.Linear(512, 10000)``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from pipegraph.codegen.internals import has_forward_hooks
from pipegraph.codegen.syntax.expressions import Argument, FunctionCall, Name, Passing, literal
from pipegraph.graph.call_tree import CallTree
from pipegraph.graph.captured import Captured

# A constructor argument that the module keeps under no attribute, or changes: how to read it back.
_RECOVERED: dict[str, Any] = {
    "bias": lambda module: module.bias is not None,
    "elementwise_affine": lambda module: module.weight is not None,
    # A kernel is functional in any case, and a stage must not change a tensor that it received.
    "inplace": lambda module: False,
}
_NOT_ARGUMENTS = ("device", "dtype", "_weight", "_freeze")
# A subclass that torch makes itself, and the public class that behaves the same.
_PUBLIC = {"NonDynamicallyQuantizableLinear": nn.Linear}


def leaf_constructor(module: nn.Module) -> FunctionCall | None:
    """``nn.Conv2d(3, 16, 3, padding=1)``.

    None if the module is no leaf of ``torch.nn``, or if this call would not make an equal one (which is tried on the
    meta device).
    """
    cls = type(module)
    cls = _PUBLIC.get(cls.__name__, cls) if cls.__module__.startswith("torch.nn.modules") else cls
    if not cls.__module__.startswith("torch.nn.modules") or getattr(nn, cls.__name__, None) is not cls:
        return None
    if any(True for _ in module.children()) or isinstance(module, nn.RNNBase):
        return None
    given = _arguments(cls, module)
    if given is None or not _makes_equal(cls, given, module):
        return None
    arguments: list[Argument] = []
    for name, entry in inspect.signature(cls).parameters.items():
        try:
            if name in given:
                passing = Passing.POSITIONAL if entry.default is entry.empty else Passing.KEYWORD
                arguments.append(Argument(literal(given[name]), name, passing))
            elif isinstance(entry.default, (bool, int, float)):
                arguments.append(Argument(literal(entry.default), name, Passing.DEFAULT))
        except TypeError:
            return None
    return FunctionCall(Name(f"nn.{cls.__name__}"), tuple(arguments))


def _arguments(cls: type[nn.Module], module: nn.Module) -> dict[str, Any] | None:
    """The constructor's arguments that differ from their defaults, read back from the module."""
    found: dict[str, Any] = {}
    for name, entry in inspect.signature(cls.__init__).parameters.items():
        if name == "self" or name in _NOT_ARGUMENTS:
            continue
        if entry.kind in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD):
            if cls is nn.Identity or cls.__init__ is nn.Module.__init__:  # arguments that mean nothing
                continue
            return None
        read = _RECOVERED.get(name)
        if name in _RECOVERED and (name == "inplace" or hasattr(module, "bias" if name == "bias" else "weight")):
            value = read(module)  # type: ignore[misc]
        elif hasattr(module, name):
            value = getattr(module, name)
        else:
            return None
        value = _shortened(cls, name, value)
        if entry.default is entry.empty or value != entry.default:
            found[name] = value
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) == 1 and "dtype" in inspect.signature(cls.__init__).parameters:
        (dtype,) = dtypes
        if dtype != torch.float32:
            found["dtype"] = dtype
    return found


def _shortened(cls: type[nn.Module], name: str, value: Any) -> Any:
    """``(3, 3)`` as ``3``: a constructor that spreads one number over all dimensions takes it back."""
    spread = isinstance(value, tuple) and value and len(set(value)) == 1 and isinstance(value[0], int)
    if spread and name in ("kernel_size", "stride", "padding", "dilation", "output_padding") and "Conv" in cls.__name__:
        return value[0]
    if spread and cls is nn.LayerNorm and len(value) == 1:
        return value[0]
    return value


def _makes_equal(cls: type[nn.Module], arguments: dict[str, Any], module: nn.Module) -> bool:
    """Whether the constructor with these arguments gives the same settings and the same state."""
    try:
        with torch.device("meta"):
            twin = cls(**arguments)
    except (TypeError, ValueError, RuntimeError):
        return False
    return _settings(twin) == _settings(module) and _shapes(twin) == _shapes(module)


def _settings(module: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple, list, torch.dtype, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in ("training", "inplace") and isinstance(value, plain)
    }


def _shapes(module: nn.Module) -> dict[str, Any]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


class LeafModules:
    """Finds calls of such modules. Equal modules are tried once on values of one shape."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._tried: dict[object, bool] = {}

    def constructor(self, called: CallTree, reads: Sequence[fx.Node], makes: Sequence[fx.Node]) -> FunctionCall | None:
        """The constructor of the module that ``called`` ran, if the call is no more than ``module(x)``.

        Args:
            called: a call without inner calls.
            reads: values from outside that its operations read, its own state left out.
            makes: values that operations outside read.
        """
        module = self._captured.modules[called.fqn].module
        if len(reads) != 1 or len(makes) != 1 or reads[0].op == "get_attr" or any(True for _ in called.calls()):
            return None
        if has_forward_hooks(module) or "forward" in vars(module):
            return None  # the call did more than a new module of that class would do
        constructor = leaf_constructor(module)
        given, expected = reads[0].meta["val"], makes[0].meta["val"]
        if constructor is None or not isinstance(given, torch.Tensor) or not isinstance(expected, torch.Tensor):
            return None
        key = (constructor, given.shape, given.dtype, expected.shape, expected.dtype)
        if key not in self._tried:
            self._tried[key] = _takes_one(module) and _gives(module, given, expected)
        return constructor if self._tried[key] else None


def _takes_one(module: nn.Module) -> bool:
    """Whether ``forward`` requires exactly one argument."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    required = [entry for entry in parameters if entry.default is entry.empty and entry.name != "self"]
    return len(required) == 1


def _gives(module: nn.Module, given: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether ``module(x)`` has the shape that the call gave. A call with more arguments may give another.

    It is tried in evaluation mode because in training some modules compute with their state, which is on the meta
    device here.
    """
    state = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    twin = copy.copy(module)
    twin.training = False
    try:
        with torch.no_grad():
            result = torch.func.functional_call(twin, state, torch.empty_like(given, device="meta"))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return False
    return isinstance(result, torch.Tensor) and result.shape == expected.shape and result.dtype == expected.dtype
