from collections.abc import Sequence
from typing import Any

import torch


def distinct_rows(leaves: Sequence[Any], dims: Sequence[int | None], rows: int, seed: int = 0) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    out = []
    for leaf, dim in zip(leaves, dims, strict=True):
        if dim is None:
            out.append(leaf)
            continue
        n = leaf.shape[dim]
        x = leaf.index_select(dim, torch.arange(rows) % n).clone()
        if x.is_floating_point():
            x = x + torch.randn(x.shape, generator=g)
        out.append(x)
    return out
