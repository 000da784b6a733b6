"""A stage takes what attention gives, however the kernel that it calls lays it out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.codegen.layers import Block, batch
from tests.codegen.parity import split


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = Block()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(3, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous().view(3, 4, 8))


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_every_kernel_of_attention(kernel: SDPBackend, tmp_path: Path) -> None:
    """With the one that was captured with, ``contiguous`` does nothing."""
    torch.manual_seed(0)
    model = Attention()
    package = split(tmp_path, model, (batch(3, 4, 8),), cut="out")
    x = torch.randn(3, 4, 8)
    with sdpa_kernel(kernel):
        actual = package.load_stage(1)(package.load_stage(0)(x))
        torch.testing.assert_close(actual, model(x))
