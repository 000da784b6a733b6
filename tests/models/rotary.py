"""Rotary embeddings: cos and sin are computed once in the model's forward and passed to every layer.

They are float tensors that need no gradient and cross every stage, unless each stage computes its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 61


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Rotary(nn.Module):
    """The angles' cos and sin, each ``[sequence, head width]``, from a table that is not part of the state."""

    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class RotaryTransformer(nn.Module):
    def __init__(self, dim: int = 32, heads: int = 4, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.rotary = Rotary(dim // heads)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.rotary(torch.arange(tokens.shape[1], device=tokens.device))
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h, cos, sin)
        return self.head(self.norm(h))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return RotaryTransformer()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


_generator = torch.Generator().manual_seed(0)
example_inputs = (torch.randint(VOCABULARY, (2, 12), generator=_generator),)
example_target = torch.randint(VOCABULARY, (2, 12), generator=_generator)
