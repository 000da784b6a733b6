"""Models that tests price, captured once."""

from __future__ import annotations

import importlib
from functools import cache

import torch
from torch import nn

import pipegraph
from pipegraph.graph.captured import Captured
from pipegraph.graph.sources import load


class Block(nn.Module):
    """A small transformer layer: 2 heads of 8, an inner width of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.inner_norm(x)).relu())


class Decoder(nn.Module):
    """A vocabulary of 50, three layers, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.zeros(2, 5, dtype=torch.long)


@cache
def model(name: str) -> Captured:
    """``decoder``, or ``example_inputs`` and ``build_model`` of a file: ``tests.models.chain``."""
    if name == "decoder":
        torch.manual_seed(0)
        return pipegraph.capture(Decoder(), (TOKENS,))
    path, _, function = name.partition(":")
    file = importlib.import_module(path).__file__
    source = load(f"{file}:{function}" if function else str(file))
    return pipegraph.capture(source.model, source.args, source.kwargs)
