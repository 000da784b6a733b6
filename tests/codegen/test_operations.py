"""Operations as the expressions a person would write: (what the model does, what the stage says)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.codegen.layers import batch
from tests.codegen.parity import differences, forward_lines, split
from tests.slow import cases

Function = Callable[[Tensor, Tensor], Any]

# x and y are f32[4, 6]; x carries a gradient, y is an input.
CASES: list[tuple[Function, str]] = [
    # operators, with brackets only if they are needed
    (lambda x, y: x + y * 2, "x + y * 2"),
    (lambda x, y: (x + y) * 2, "(x + y) * 2"),
    (lambda x, y: x - (y - x), "x - (y - x)"),
    (lambda x, y: x - y - x, "x - y - x"),
    (lambda x, y: x / (y * x), "x / (y * x)"),
    (lambda x, y: 1 - x, "1 - x"),
    (lambda x, y: 2 / (x + 3), "(x + 3).reciprocal() * 2"),
    (lambda x, y: -(x**2), "-(x**2)"),
    (lambda x, y: (-x) ** 2, "(-x) ** 2"),
    (lambda x, y: 2**x, "2**x"),
    (lambda x, y: (x @ y.T) ** 2, "(x @ y.T) ** 2"),
    (lambda x, y: x**-0.5, "x**-0.5"),
    (lambda x, y: x * -2.5, "x * -2.5"),
    (lambda x, y: x % 2, "x % 2"),
    (lambda x, y: x @ y.T @ x, "x @ y.T @ x"),
    (lambda x, y: torch.add(x, y, alpha=2), "x.add(y, alpha=2)"),
    (lambda x, y: torch.sub(x, y, alpha=0.5), "x.sub(y, alpha=0.5)"),
    (lambda x, y: x * (y > 0), "x * (y > 0)"),
    (lambda x, y: x * ((y > 0) & (y < 1)), "x * ((y > 0) & (y < 1))"),
    (lambda x, y: x * ((y > 0) | ~(y == 1)), "x * ((y > 0) | ~(y == 1))"),
    (lambda x, y: x * ((y >= 0) ^ (y != 1)), "x * ((y >= 0) ^ (y != 1))"),
    (lambda x, y: torch.div(x, y, rounding_mode="floor"), 'x.div(y, rounding_mode="floor")'),
    # random numbers that torch only writes into a tensor
    (lambda x, y: x + torch.zeros_like(x).uniform_(0, 0.5), "x + torch.zeros_like(x).uniform_(to=0.5)"),
    (lambda x, y: x + torch.zeros_like(x).uniform_(-1.0, 0.5), "x + torch.zeros_like(x).uniform_(-1.0, 0.5)"),
    (lambda x, y: x + torch.zeros_like(x).uniform_(-1.0), "x + torch.zeros_like(x).uniform_(-1.0)"),
    (lambda x, y: x + torch.empty_like(y).exponential_(2.0), "x + torch.empty_like(y).exponential_(lambd=2.0)"),
    # subscripts
    (lambda x, y: x[0], "x[0]"),
    (lambda x, y: x[:, -1], "x[:, -1]"),
    (lambda x, y: x[:, 1:3], "x[:, 1:3]"),
    (lambda x, y: x[..., ::2], "x[:, ::2]"),
    (lambda x, y: x[1:], "x[1:]"),
    (lambda x, y: x[:-1], "x[:-1]"),
    (lambda x, y: x[None], "x.unsqueeze(0)"),
    (lambda x, y: x.view(2, 2, 6)[..., 1], "x.unflatten(0, (-1, 2))[..., 1]"),
    (lambda x, y: x[:, [1, 0]], "x[:, [1, 0]]"),
    (lambda x, y: x[:, torch.tensor([3, 1, 1])], "x[:, [3, 1, 1]]"),
    (lambda x, y: x[:, :] + 1, "x + 1"),
    # shapes
    (lambda x, y: x.split([2, 4], 1)[0], "x.split([2, 4], dim=1)[0]"),
    (lambda x, y: x.view(2, -1), "x.view(2, -1)"),
    (lambda x, y: x.view(-1, 8), "x.view(-1, 8)"),
    (lambda x, y: x.view(8, 3), "x.view(-1, 3)"),
    (lambda x, y: x.view(4, -1, 3), "x.unflatten(-1, (-1, 3))"),
    (lambda x, y: x.view(4, 1, 6), "x.unsqueeze(1)"),
    (lambda x, y: x[None].view(1, 24), "x.unsqueeze(0).flatten(1)"),
    (lambda x, y: x.view(4, 6) * 2, "x * 2"),
    (lambda x, y: x.reshape(x.shape[0] // 2, 2, 6), "x.reshape(-1, 2, 6)"),
    (lambda x, y: x.permute(1, 0), "x.permute(1, 0)"),
    (lambda x, y: x.transpose(-1, -2), "x.transpose(-1, -2)"),
    (lambda x, y: x.T, "x.T"),
    (lambda x, y: x.mT, "x.mT"),
    (lambda x, y: x.flatten(), "x.flatten()"),
    (lambda x, y: x.unflatten(-1, (2, 3)), "x.unflatten(-1, (-1, 3))"),
    (lambda x, y: x.unflatten(-1, (1, 6)), "x.unsqueeze(1)"),
    (lambda x, y: x[None].expand(2, -1, -1), "x.unsqueeze(0).expand(2, -1, -1)"),
    (lambda x, y: x.repeat(2, 1), "x.repeat(2, 1)"),
    (lambda x, y: x.T.contiguous(), "x.T.contiguous()"),
    (lambda x, y: torch.cat([x, y], -1), "torch.cat([x, y], dim=-1)"),
    (lambda x, y: torch.stack([x, y], dim=1), "torch.stack([x, y], dim=1)"),
    (lambda x, y: x.roll(1, 0).flip(0), "x.roll(1, dims=[0]).flip([0])"),
    (lambda x, y: F.pad(x, (1, 2)), "F.pad(x, [1, 2])"),
    # reductions and elementwise functions
    (lambda x, y: x.sum(), "x.sum()"),
    (lambda x, y: x.sum(-1, keepdim=True), "x.sum(-1, keepdim=True)"),
    (lambda x, y: x.mean((0, 1)), "x.mean([0, 1])"),
    (lambda x, y: x.var(dim=0, unbiased=False), "x.var(0, unbiased=False)"),
    (lambda x, y: torch.logsumexp(x, 1), "x.logsumexp(1)"),
    (lambda x, y: x.exp().log1p(), "x.exp().log1p()"),
    (lambda x, y: torch.clamp(x, -1, 1), "x.clamp(min=-1, max=1)"),
    (lambda x, y: x.clamp(max=math.inf), 'x.clamp(max=float("inf"))'),
    (lambda x, y: x.masked_fill(y > 0, -math.inf).exp(), 'x.masked_fill(y > 0, float("-inf")).exp()'),
    (lambda x, y: x * math.nan, 'x * float("nan")'),
    (lambda x, y: x * 1e-7 + 1e20, "x * 1e-07 + 1e20"),
    (lambda x, y: torch.where(y > 0, x, 0.0), "torch.where(y > 0, x, 0.0)"),
    (lambda x, y: torch.maximum(x, y), "x.maximum(y)"),
    (lambda x, y: x.softmax(-1), "F.softmax(x, dim=-1)"),
    (lambda x, y: x.softmax(-1, dtype=torch.float32), "F.softmax(x, dim=-1, dtype=torch.float32)"),
    (lambda x, y: F.log_softmax(x, -1, dtype=torch.float64), "F.log_softmax(x, dim=-1, dtype=torch.float64)"),
    (lambda x, y: F.gelu(x, approximate="tanh"), 'F.gelu(x, approximate="tanh")'),
    (lambda x, y: F.leaky_relu(x, 0.2), "F.leaky_relu(x, negative_slope=0.2)"),
    (
        lambda x, y: F.normalize(x),
        "x / torch.linalg.vector_norm(x, dim=[1], keepdim=True).clamp_min(1e-12).expand_as(x)",
    ),
    (lambda x, y: x.double(), "x.to(torch.float64)"),
    (lambda x, y: x.to(torch.bfloat16), "x.to(torch.bfloat16)"),
    (lambda x, y: x.float().to(y).type_as(y) + 1, "x.to(torch.float32).to(x.dtype) + 1"),
    (lambda x, y: F.layer_norm(x, (6,)), "F.layer_norm(x, [6])"),
    (lambda x, y: F.rms_norm(x, (6,), eps=1e-3), "F.rms_norm(x, [6], eps=0.001)"),
    (lambda x, y: F.group_norm(x, 2), "F.group_norm(x, 2)"),
    (lambda x, y: F.interpolate(x[None], scale_factor=2), "F.interpolate(x.unsqueeze(0), scale_factor=2)"),
    (lambda x, y: F.interpolate(x[None], size=9), "F.interpolate(x.unsqueeze(0), size=(9,))"),
    (
        lambda x, y: F.interpolate(x[None, None], scale_factor=(2, 1.5), mode="bilinear", align_corners=True),
        'F.interpolate(x.unsqueeze(0).unsqueeze(1), scale_factor=(2, 1.5), mode="bilinear", align_corners=True)',
    ),
    (
        lambda x, y: F.interpolate(x[None, None], size=(8, 8), mode="bicubic", antialias=True),
        'F.interpolate(x.unsqueeze(0).unsqueeze(1), size=(8, 8), mode="bicubic", antialias=True)',
    ),
    (
        lambda x, y: F.batch_norm(x, None, None, training=True),
        "F.batch_norm(x, None, None, training=True, momentum=0.1, eps=1e-05)",
    ),
    (
        lambda x, y: F.scaled_dot_product_attention(x, y, y, is_causal=True),
        "F.scaled_dot_product_attention(x, y, y, is_causal=True)",
    ),
    (
        lambda x, y: F.scaled_dot_product_attention(x, y, y, scale=6**-0.5),
        "F.scaled_dot_product_attention(x, y, y)",
    ),
    (
        lambda x, y: F.scaled_dot_product_attention(x, y, y, scale=0.4),
        "F.scaled_dot_product_attention(x, y, y, scale=0.4)",
    ),
    (lambda x, y: torch.einsum("ij,kj->ik", x, y), 'torch.einsum("ij,kj->ik", x, y)'),
    (lambda x, y: torch.block_diag(x, y), "torch.block_diag(x, y)"),
    (lambda x, y: torch.cartesian_prod(x[0], y[0]), "torch.cartesian_prod(x[0], y[0])"),
    (lambda x, y: torch.meshgrid(x[0], y[0], indexing="ij")[0], 'torch.meshgrid(x[0], y[0], indexing="ij")[0]'),
    (lambda x, y: torch.tensordot(x, y, dims=([1], [1])), "torch.tensordot(x, y, dims=([1], [1]))"),
    (lambda x, y: torch.cdist(x, y, p=1.5), "torch.cdist(x, y, p=1.5)"),
    (
        lambda x, y: torch.stft(x, 4, hop_length=2, window=y[0, :4], center=False, return_complex=True).abs(),
        "torch.stft(x, 4, center=False, hop_length=2, window=y[0, :4], return_complex=True).abs()",
    ),
    (
        lambda x, y: F.unfold(x.view(1, 1, 4, 6), 2, stride=2),
        "F.unfold(x.unflatten(0, (-1, 1, 4)), (2, 2), stride=(2, 2))",
    ),
    (lambda x, y: F.fold(x, (3, 4), (2, 2)), "F.fold(x, (3, 4), (2, 2))"),
    (lambda x, y: F.dropout2d(x.view(1, 2, 2, 6), 0.0), "F.dropout2d(x.unflatten(0, (-1, 2, 2)), 0.0)"),
    (lambda x, y: F.max_pool1d(x, 2, return_indices=True)[1] * 2, "F.max_pool1d(x, 2, return_indices=True)[1] * 2"),
    (lambda x, y: F.adaptive_max_pool3d(x.view(1, 2, 2, 6), 2), "F.adaptive_max_pool3d(x.unflatten(0, (-1, 2, 2)), 2)"),
    (
        lambda x, y: F.max_unpool2d(x[None], y.flatten().argsort().view(1, 4, 6), 2),
        "F.max_unpool2d(x.unsqueeze(0), y.flatten().argsort().view(1, 4, 6), 2)",
    ),
    (
        lambda x, y: F.max_unpool2d(x[None], y.flatten().argsort().view(1, 4, 6), 2, output_size=(9, 13)),
        "F.max_unpool2d(x.unsqueeze(0), y.flatten().argsort().view(1, 4, 6), 2, output_size=(9, 13))",
    ),
    (
        lambda x, y: F.embedding_bag(y[:, 0].argsort(), x, y[:2, 0].argsort(), mode="sum", padding_idx=0),
        'F.embedding_bag(y[:, 0].argsort(), x, y[:2, 0].argsort(), mode="sum", padding_idx=0)',
    ),
    (lambda x, y: F.logsigmoid(x), "F.logsigmoid(x)"),
    (lambda x, y: F.relu6(F.softshrink(x, 0.1)), "F.relu6(F.softshrink(x, lambd=0.1))"),
    (lambda x, y: F.soft_margin_loss(x, y.sign()), "F.soft_margin_loss(x, y.sign())"),
    (lambda x, y: F.triplet_margin_loss(x, y, x * y, margin=0.5), "F.triplet_margin_loss(x, y, x * y, margin=0.5)"),
    (lambda x, y: x.to(torch.float64, copy=True), "x.to(torch.float64, copy=True)"),
    (lambda x, y: torch.outer(x[0], y[0]).tril(), "x[0].outer(y[0]).tril()"),
    (lambda x, y: torch.linalg.vector_norm(x, dim=1), "torch.linalg.vector_norm(x, dim=[1])"),
    (lambda x, y: torch.fft.rfft(x).abs(), "torch.fft.rfft(x).abs()"),
    (lambda x, y: torch.ops.aten.mse_loss(x, y, 2), 'F.mse_loss(x, y, reduction="sum")'),
    (lambda x, y: x.neg().neg(), "(-x).neg()"),
    (lambda x, y: (x.abs() + 1) ** y**2, "(x.abs() + 1) ** y**2"),
    (lambda x, y: y**x**2, "y**x**2"),
    # several results
    (lambda x, y: x.max(-1).values, "x.max(-1)[0]"),
    (lambda x, y: x.topk(2).values, "x.topk(2)[0]"),
    (lambda x, y: x.chunk(3, -1)[1], "x.chunk(3, dim=-1)[1]"),
    (lambda x, y: x.unbind(0)[2], "x.unbind()[2]"),
    # tensors made on the spot, on the device of the stage
    (lambda x, y: x * torch.arange(6, device=x.device), "x * torch.arange(6, device=z.device)"),
    (lambda x, y: x * torch.arange(0, 6), "x * torch.arange(6, device=z.device)"),
    (lambda x, y: x * torch.arange(0, 12, 2), "x * torch.arange(0, 12, step=2, device=z.device)"),
    (lambda x, y: x * torch.arange(1, 7), "x * torch.arange(1, 7, device=z.device)"),
    (lambda x, y: x * torch.arange(6, dtype=torch.int64), "x * torch.arange(6, device=z.device)"),
    (lambda x, y: x * torch.full((6,), -2.0), "x * torch.full((6,), -2.0, device=z.device)"),
    (lambda x, y: x + x.new_zeros(6), "x + x.new_zeros(6)"),
    (lambda x, y: x + torch.zeros((), dtype=torch.float32), "x + torch.zeros((), device=z.device)"),
    (lambda x, y: x * torch.ones(4, 1, dtype=torch.int64), "x * torch.ones(4, 1, dtype=torch.int64, device=z.device)"),
    (lambda x, y: x + torch.ones_like(y), "x + torch.ones_like(y)"),
    (lambda x, y: F.mse_loss(x, y, reduction="sum"), 'F.mse_loss(x, y, reduction="sum")'),
    (lambda x, y: F.cross_entropy(x, y.softmax(1)), "F.cross_entropy(x, F.softmax(y, dim=1))"),
    (
        lambda x, y: F.cross_entropy(x, y.argmax(1), ignore_index=-1),
        "F.cross_entropy(x, y.argmax(dim=1), ignore_index=-1)",
    ),
]


# They go one way through the code, and differ in their row of the table of operators.
SLOW = [case for index, case in enumerate(CASES) if index % 3]


@pytest.mark.parametrize(("function", "expected"), cases(CASES, slow=SLOW), ids=[text for _, text in CASES])
def test_operation(function: Function, expected: str, tmp_path: Path) -> None:
    """The text, and that it computes the same, gradients included."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(6, 6)

        def forward(self, z: Tensor, y: Tensor) -> Any:
            x = self.inner(z)
            return (function(x, y),)

    model, inputs = Model(), (batch(4, 6), batch(4, 6) + 0.1)
    package = split(tmp_path, model, inputs, cut=1)
    assert forward_lines(package) == ["x = self.inner(z)", f"return {expected}"]
    assert differences(package, model, inputs) == []


def test_a_range_of_random_numbers_is_passed_by_position(tmp_path: Path) -> None:
    """Its first argument is called ``from``."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.empty_like(x).uniform_(-0.5, 0.25)
            return self.inner(x + noise) * noise

    model, x = Noisy(), batch(4, 6)
    package = split(tmp_path, model, (x,), cut=1)
    assert ".uniform_(-0.5, 0.25)" in forward_lines(package)[0]
    assert differences(package, model, (x,)) == []
