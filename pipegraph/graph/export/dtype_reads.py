"""Whether a model asks for the dtype of a tensor, or casts one to a floating dtype.

If it does neither, its operations are the same in every dtype, and follow from one graph. Most of what transformers
has does; most convolutional models do not.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode, handle_torch_function

from pipegraph.errors import frame_above

_TORCH: Final = f"{Path(torch.__file__).parent}/"
_LAYERS: Final = f"{Path(torch.nn.__file__).parent}/"
_ATTENTION: Final = f"{_LAYERS}modules/activation.py", f"{_LAYERS}modules/transformer.py"
"""They read the dtype that a mask would have, and hand masks to ``F.multi_head_attention_forward``."""
_RECURRENT: Final = f"{_LAYERS}modules/rnn.py"
"""A recurrent layer begins with zeros of the dtype of its input."""
_PIPEGRAPH: Final = f"{Path(__file__).parents[2]}/"

_QUESTIONS: Final = frozenset(
    [
        *("dtype", "element_size", "finfo", "get_default_dtype", "is_complex", "is_floating_point", "itemsize"),
        *("nbytes", "new", "new_tensor", "promote_types", "result_type", "type", "type_as"),
    ]
)
_CASTS: Final = frozenset(["to", "float", "double", "half", "bfloat16"])

_ONLY_OF: Final[Mapping[Any, tuple[str, ...]]] = MappingProxyType(
    {
        F.multi_head_attention_forward: ("key_padding_mask", "attn_mask"),
        F.interpolate: ("scale_factor",),
    }
)
"""Functions of torch that ask for dtypes of these arguments alone."""


class DtypeReads(TorchFunctionMode):
    """Notices whether the code of a model, or of a layer of torch, asks for a floating dtype or casts to one.

    Attributes:
        has_reads: whether it does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_reads = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.has_reads:
            if isinstance(func, FunctionType):
                self.has_reads = _asks_inside(func, args, kwargs)
            elif _reads_dtype(func, args, kwargs):
                self.has_reads = _is_of_model(frame_above(1))  # the tracer asks for dtypes as well
        return func(*args, **kwargs)


def _asks_inside(function: FunctionType, args: Any, kwargs: Any) -> bool:
    """Return whether a Python function of torch, which calls others unnoticed, asks for a dtype."""
    if function.__name__.startswith("sym_"):  # of sizes
        return False
    if function not in _ONLY_OF:
        return _asks_for_dtype(function)
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    return any(isinstance(arguments.get(name), Tensor) for name in _ONLY_OF[function])


def _reads_dtype(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function of torch's C++ asks for a dtype, or casts to one."""
    name = getattr(function, "__name__", "")
    if name == "__get__":  # of an attribute
        name = getattr(function.__self__, "__name__", "")
    return name in _QUESTIONS or (name in _CASTS and _is_to_float(name, (*args[1:], *kwargs.values())))


def _is_to_float(name: str, arguments: tuple[Any, ...]) -> bool:
    return name != "to" or any(
        isinstance(argument, Tensor) or (isinstance(argument, torch.dtype) and argument.is_floating_point)
        for argument in arguments
    )


@cache
def _asks_for_dtype(function: FunctionType) -> bool:
    """Return whether a Python function of torch, or one that it calls, has an attribute such as ``x.dtype``."""
    visited, waiting = {function, handle_torch_function}, [function]
    while waiting:
        current = waiting.pop()
        for code in _codes(current.__code__):
            for instruction in dis.get_instructions(code):
                name = instruction.argval
                if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name in _QUESTIONS | _CASTS:
                    return True
                callee = current.__globals__.get(name) if instruction.opname == "LOAD_GLOBAL" else None
                if isinstance(callee, FunctionType) and callee not in visited:
                    visited.add(callee)
                    waiting.append(callee)
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def begins_recurrence(node: fx.Node) -> bool:
    """Return whether an operation makes the zeros with which a recurrent layer of torch begins."""
    frames = re.findall(r'File "(.*?)", line', node.meta.get("stack_trace") or "")
    return node.target is torch.ops.aten.zeros.default and bool(frames) and frames[-1] == _RECURRENT


def _is_of_model(frame: FrameType | None) -> bool:
    """Return whether a call comes from a model, from a library or from a layer of torch, through other modes."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else ""
    if file.startswith(_TORCH):
        return file.startswith(_LAYERS) and file not in (*_ATTENTION, _RECURRENT)
    return not file.startswith(_PIPEGRAPH)
