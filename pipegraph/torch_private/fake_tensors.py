"""Fake tensors and dispatch modes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from pipegraph.torch_private.symbolic_shapes import UnboundSizeError
from pipegraph.torch_private.tracing import TORCH_LOCK

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "fake_empty",
    "fake_mode_of",
    "fake_tensors",
    "is_fake",
    "new_fake_mode",
    "no_dispatch",
    "register_grouped_mm",
    "values_of",
]


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


@contextmanager
def fake_tensors(environment: Any = None) -> Iterator[Any]:
    """Let tensors have a shape and no memory. The environment is that of the symbols in their shapes.

    Public torch has such tensors only inside `torch.export` and `torch.compile`. Tensors with memory are allowed: they
    become constants of the graph. Torch logs as an error what does not run on fake tensors, and raises it as well.

    Where torch asks itself whether a size is 1, as for a broadcast, a symbol counts as another number, and may still
    be 1: `backed_size_oblivious`. Where the model asks, a condition is noted; and also where torch cannot say without
    one how a size follows, as for a slice between two sizes.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import _config

    class WithConditions(FakeTensorMode):
        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().dispatch(*args, **kwargs)
            except UnboundSizeError:
                with _config.patch(backed_size_oblivious=False):  # type: ignore[attr-defined]
                    return super().dispatch(*args, **kwargs)

    register_grouped_mm()
    logger, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_another_thread)
    try:
        with ExitStack() as stack:
            if environment is not None:
                stack.enter_context(TORCH_LOCK)  # before torch 2.13 its configuration is that of all threads
                stack.enter_context(_config.patch(backed_size_oblivious=True))  # type: ignore[attr-defined]
            yield stack.enter_context(WithConditions(allow_non_fake_inputs=True, shape_env=environment))
    finally:
        logger.removeFilter(is_of_another_thread)


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory, or stands for a value of a graph."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def values_of(tensor: torch.Tensor) -> bytes | None:
    """The values of a tensor, also while a mode without memory is active; None if it has none.

    ``no_dispatch``: the mode would run the reading of memory as an operation on a fake tensor.
    """
    if tensor.is_meta or fake_mode_of(tensor) is not None:
        return None
    with no_dispatch():
        return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@cache
def register_grouped_mm() -> None:
    """Let fake tensors of every dtype go through ``F.grouped_mm``, as real ones do: torch says so of bfloat16 alone.

    Rows of the result lie at multiples of 16 bytes where torch is built for CUDA, as torch says of bfloat16.
    """

    def grouped_mm(
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        dtype = out_dtype or mat_a.dtype
        rows, columns = mat_a.shape[-2], mat_b.shape[-1]
        step = 16 // dtype.itemsize if torch.version.cuda else 1
        padded = (columns + step - 1) // step * step
        if mat_a.dim() != mat_b.dim():
            return mat_a.new_empty_strided((rows, columns), (padded, 1), dtype=dtype)
        groups = mat_a.shape[0] if offs is None else offs.shape[0]
        return mat_a.new_empty_strided((groups, rows, columns), (rows * padded, padded, 1), dtype=dtype)

    torch.library.register_fake("aten::_grouped_mm", grouped_mm, allow_override=True)  # which torch 2.11 asks for
