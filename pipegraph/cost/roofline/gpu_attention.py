"""Attention as a GPU computes it, for graphs that are priced on a machine without one."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten

_FLASH_HEAD = 256  # the largest head that flash attention takes


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` by the kernel that torch chooses for these arguments on a GPU.

    On tensors without memory torch chooses as for the CPU: products and a softmax that write all the scores out where,
    say, the heads of keys and values differ in size. Query [batch, heads, length, size], in any dtype.
    """
    if query.dim() != 4:
        return aten.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
