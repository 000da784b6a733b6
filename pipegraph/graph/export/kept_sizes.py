"""Keep dynamic sizes that Python or torch would make numbers: ``int(n * 0.5)``, ``torch.linspace(0, 1, n)``.

Python's ``int`` takes nothing but a number from a fraction, and ``torch.linspace`` and a ``torch.arange`` of fractions
take numbers alone. While a model is exported, others stand in their places.

    int(n * 0.5)              torch.sym_int(n * 0.5)
    torch.linspace(0, 1, n)   torch.ops.pipegraph.linspace(0, 1, n), which a graph has as aten.linspace
    torch.arange(0.5, n)      torch.ops.pipegraph.arange(0.5, n, 1), which a graph has as aten.arange
"""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from pipegraph.graph.model_structure import python_modules_of, source_has
from pipegraph.torch_private.export import replaced

aten = torch.ops.aten

_INT: Final = re.compile(r"\bint\b")

# ---- int -------------------------------------------------------------------------------------------------------------


class _WholeNumberType(type):
    """The type of `WholeNumber`: it is Python's ``int`` in questions about types."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            return torch.sym_int(args[0])
        return builtins.int(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (builtins.int, torch.SymInt))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.int)


class WholeNumber(int, metaclass=_WholeNumberType):
    """Python's ``int``, which makes a symbolic integer of a symbolic fraction."""


@contextmanager
def whole_numbers_kept(model: nn.Module) -> Iterator[None]:
    """Let ``int`` in the files of a model's classes be `WholeNumber`."""
    modules = [module for module in python_modules_of(model) if "int" not in vars(module)]
    try:
        for module in modules:
            vars(module)["int"] = WholeNumber
        yield
    finally:
        for module in modules:
            vars(module).pop("int", None)


def may_read_int(model: nn.Module, line: str) -> bool:
    """Return whether ``int`` may be what fixes a size.

    Args:
        line: that fixes it, ``model.py:12: x[:, :int(n * 0.5)]``; "" if it is unknown.
    """
    return bool(_INT.search(line)) if line else source_has(model, _INT)


# ---- linspace and arange ---------------------------------------------------------------------------------------------

_library = torch.library.Library("pipegraph", "FRAGMENT")
_library.define(
    "linspace(Scalar start, Scalar end, SymInt steps, *, ScalarType? dtype=None, Device? device=None) -> Tensor"
)
_library.define("arange(float start, SymInt end, int step, *, ScalarType? dtype=None, Device? device=None) -> Tensor")


def _linspace(start: float, end: float, steps: int, *, dtype: Any = None, device: Any = None) -> Tensor:
    return torch.linspace(start, end, steps, dtype=dtype, device=device)


def _arange(start: float, end: int, step: int, *, dtype: Any = None, device: Any = None) -> Tensor:
    return torch.arange(start, end, step, dtype=dtype, device=device)


@torch.library.register_fake("pipegraph::linspace", lib=_library)
def _fake_linspace(start: float, end: float, steps: int, *, dtype: Any = None, device: Any = None) -> Tensor:
    return torch.empty((steps,), dtype=dtype, device=device)


@torch.library.register_fake("pipegraph::arange", lib=_library)
def _fake_arange(start: float, end: int, step: int, *, dtype: Any = None, device: Any = None) -> Tensor:
    """The length of ``range(start, end, step)`` for an ``end`` and a ``step`` that are integers."""
    floor = math.floor(start)
    length = (end - floor + step - 1) // step if floor == start else (end - floor - 1) // step + 1
    return torch.empty((length,), dtype=dtype, device=device)


_library.impl("linspace", _linspace, "CompositeExplicitAutograd")
_library.impl("arange", _arange, "CompositeExplicitAutograd")

_operators = torch.ops.pipegraph
CALLS: Final[Mapping[Any, Callable[..., Tensor]]] = MappingProxyType(
    {_operators.linspace.default: _linspace, _operators.arange.default: _arange}
)
"""The operators that stand for functions of torch → these."""

OF_ATEN: Final[Mapping[Any, Any]] = MappingProxyType(
    {_operators.linspace.default: aten.linspace.default, _operators.arange.default: aten.arange.start_step}
)
"""The operators that stand for others → those, which take the same arguments."""


@contextmanager
def factory_sizes_kept() -> Iterator[None]:
    """Let ``torch.linspace`` and ``torch.arange`` keep a dynamic size."""

    def linspace(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        named = {**dict(zip(("start", "end", "steps"), args, strict=False)), **kwargs}
        if isinstance(named.get("steps"), torch.SymInt) and _is_plain(named, "start", "end"):
            start, end, steps = (named[name] for name in ("start", "end", "steps"))
            result: Tensor = torch.ops.pipegraph.linspace(start, end, steps, **_options(named))
            return result
        return original(*args, **kwargs)

    def arange(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        names = ("end",) if len(args) == 1 else ("start", "end", "step")
        named = {"start": 0, "step": 1, **dict(zip(names, args, strict=False)), **kwargs}
        start, end, step = (named.get(name) for name in ("start", "end", "step"))
        is_kept = isinstance(start, float) and isinstance(end, torch.SymInt) and type(step) is int and step > 0
        if is_kept and _is_plain(named, "start"):
            dtype = named.get("dtype") or torch.get_default_dtype()
            result: Tensor = torch.ops.pipegraph.arange(start, end, step, **_options({**named, "dtype": dtype}))
            return result
        return original(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(torch, "linspace", linspace))
        stack.enter_context(replaced(torch, "arange", arange))
        yield


def _is_plain(named: Mapping[str, Any], *numbers: str) -> bool:
    """Return whether arguments are numbers, and no argument is given that the operators have not."""
    names = {"start", "end", "steps", "step", "dtype", "device", "layout", "requires_grad", "pin_memory"}
    unusual = named.get("requires_grad") or named.get("pin_memory") or named.get("layout") not in (None, torch.strided)
    plain = all(isinstance(named.get(name), (int, float, torch.SymInt)) for name in numbers)
    return named.keys() <= names and not unusual and plain


def _options(named: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: named[name] for name in ("dtype", "device") if named.get(name) is not None}
    return options | ({"device": torch.device(options["device"])} if "device" in options else {})
