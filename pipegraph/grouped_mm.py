"""``F.grouped_mm`` on fake tensors, of every dtype that its kernels take: torch says so of bfloat16 alone."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@cache
def register_grouped_mm() -> None:
    """Let fake tensors of every dtype go through ``F.grouped_mm``, as real ones do.

    Rows of the result lie at multiples of 16 bytes where torch is built for CUDA, as torch says of bfloat16.
    """
    import torch

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
