"""Models whose classes are written in the text of their author, or cannot be."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOGGER = logging.getLogger(__name__)
EPSILON = 1e-5


@dataclass
class Config:
    width: int = 8
    heads: int = 2
    scale: float | None = None


def rotate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def normalized(x: Tensor, upcast: bool = False) -> Tensor:
    if upcast:
        x = x.double()
    # by the root of the mean square
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()


class Attention(nn.Module):
    """Reads a configuration, calls functions of the file and a method of its own."""

    causal = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.heads = config.heads
        self.bias = None
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    @property
    def head_dim(self) -> int:
        return self.config.width // self.heads

    def split_heads(self, x: Tensor) -> Tensor:
        return torch.stack(x.chunk(self.heads, dim=-1), dim=1)

    def forward(self, x: Tensor, mask: Tensor | None = None, debug: bool = False) -> tuple[Tensor, Tensor | None]:
        q, k, v = map(self.split_heads, self.qkv(x).chunk(3, dim=-1))
        q = rotate(q)  # positions
        scores = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
        if self.causal:
            # later positions are hidden
            length = x.shape[1]
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        if mask is not None:
            scores = scores + mask
        if debug:
            LOGGER.warning("scores %s", scores.shape)
        weights = scores.softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        return self.out(mixed), None


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.experts = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(3))
        self.noise = 0.5
        self.act = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(normalized(x), mask=None)
        x = x + mixed
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if index == 0:
                total = total + expert(x)
            else:
                total = total + self.act(expert(x)) / index
        if self.training:
            total = total + self.noise * total.tanh()
        else:
            total = total * 2
        return x + total


class Chain(nn.Module):
    """Blocks of a class, one after the other."""

    def __init__(self, block: type[nn.Module] = Block, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block(Config()) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class LoggingBlock(nn.Module):
    """Calls what no package has."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        LOGGER.debug("called")
        return self.inner(x).relu() + x


class OuterVariable(LoggingBlock):
    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class InPlaceBlock(LoggingBlock):
    """Writes into its argument, which another stage may have sent."""

    def forward(self, x: Tensor) -> Tensor:
        x += 0.5
        return self.inner(x).relu() + x


class Chained(nn.Module):
    """``elif`` in several forms."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner = nn.Linear(config.width, config.width)
        self.kind = "sum"

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.kind == "product":
            y = y * x
        elif self.kind == "sum":
            y = y + x
        else:
            raise ValueError(self.kind)
        for power in range(1, 4):
            if power == 1:
                y = y + 1
            elif power == 5:
                y = y - 1
            elif power == 2:
                y = y * 0.5
            else:
                y = y.tanh()
        return y


class HeadsByNumber(nn.Module):
    """Names its number of heads, of which ranks along tp have some."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)


class AroundHeads(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = HeadsByNumber(config)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        # the residual
        return x + self.out(self.attention(x))


class LoggedRotation(nn.Module):
    """Calls a function that other classes have in their author's text, and is written from the graph itself."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        LOGGER.debug("called")
        return rotate(self.inner(x)) * 2 + x


class Mixed(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = Block(config)
        self.second = LoggedRotation(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Guarded(nn.Module):
    """Statements of several kinds, of which one side ran."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner = nn.Linear(config.width, config.width)
        self.extra = nn.ModuleList()
        self.drop = nn.Dropout(0.0)

    @torch.no_grad()
    def bound(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True) + 1

    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        try:
            y = self.inner(x)
        except RuntimeError:
            y = x
        for layer in self.extra:
            y = layer(y)
        with torch.autocast("cpu", enabled=False):
            y = self.drop(y) / self.bound(y)
        if not isinstance(x, Tensor):
            y = y.tensor
        else:
            # a plain tensor
            y = y * scale
        return y
        return x
