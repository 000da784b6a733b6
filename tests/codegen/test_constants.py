"""Tensors that a model holds as plain attributes: a stage moves them, and converts none."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.layers import ints
from tests.codegen.parity import split

DTYPES = {"scale": torch.float32, "rotation": torch.complex64, "shift": torch.float32, "order": torch.int64}


class Rotated(nn.Module):
    """A block with its own table, which rotates pairs of features by the given angles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = torch.rand(8) * 3

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        scaled = self.linear(x) * self.scale
        pairs = torch.view_as_complex(scaled.float().reshape(*scaled.shape[:-1], 4, 2))
        return x + torch.view_as_real(pairs * rotation).flatten(-2).type_as(x)


class Rotary(nn.Module):
    """Complex, floating-point, zero-dimensional and whole-number tables, as Llama's first implementation has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Rotated() for _ in range(4))
        self.rotation = torch.polar(torch.ones(16, 4), torch.rand(16, 4))
        self.shift = torch.tensor(0.3)
        self.order = torch.tensor([3, 1, 0, 2, 4, 7, 6, 5])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.rotation[: tokens.shape[1]])
        return x[..., self.order] - self.shift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_attributes_keep_their_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = Rotary(), ints(11, 3, 5)
    package = split(tmp_path, model, (tokens,))
    first, last = (package.load_stage(index).to(dtype) for index in range(2))
    assert torch.equal(last(first(tokens)), copy.deepcopy(model).to(dtype)(tokens))
    dtypes = {name.rpartition(".")[2]: buffer.dtype for name, buffer in last.named_buffers()}
    assert dtypes == DTYPES


def test_plain_attributes_move(tmp_path: Path) -> None:
    stage = split(tmp_path, Rotary(), (ints(11, 3, 5),)).load_stage(1)
    assert {buffer.device.type for buffer in stage.to("meta", torch.bfloat16).buffers()} == {"meta"}
    assert {buffer.device.type for buffer in stage.to_empty(device="cpu").buffers()} == {"cpu"}
    assert {name.rpartition(".")[2]: buffer.dtype for name, buffer in stage.named_buffers()} == DTYPES
