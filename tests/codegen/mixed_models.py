"""Models of which some statements cannot stand in a package: dispatch tables, containers, unread arguments, cuts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def scaled(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2), None


ATTENTION_FUNCTIONS = {"scaled": scaled}


@dataclass
class Output:
    last: Tensor
    attentions: Tensor | None = None


class Cache:
    """An object that no package has."""

    length = 0


class DispatchedAttention(nn.Module):
    """Calls a function of a table, which takes the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.kind = 4, "scaled"
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: int,
    ) -> tuple[Tensor, Tensor | None]:
        rows = x.shape[:-1]
        shape = (*rows, -1, self.head_dim)
        # one head has four features
        q = self.query(x).view(shape).transpose(1, 2)
        k = self.key(x).view(shape).transpose(1, 2)
        v = self.value(x).view(shape).transpose(1, 2)
        # the function of the configuration
        function = ATTENTION_FUNCTIONS[self.kind]
        mixed, weights = function(self, q, k, v, mask)
        mixed = mixed.reshape(*rows, -1).contiguous()  # heads side by side
        return self.out(mixed), weights


class Layer(nn.Module):
    """Hands on arguments that nothing reads, and keeps a branch that only half precision takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.inner = nn.LayerNorm(8), DispatchedAttention(), nn.Linear(8, 8)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor | None = None, cache: Cache | None = None, **kwargs: int
    ) -> Tensor:
        residual = x
        # attention
        x, _ = self.attention(self.norm(x), mask=mask, positions=positions, cache=cache, **kwargs)
        x = residual + x
        if x.dtype == torch.float16:
            x = x.clamp(-60000, 60000)
        return x + self.inner(x).relu()


class Encoder(nn.Module):
    """Returns an object, and is cut in the loop over its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.scale = nn.Embedding(1, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Output:
        positions = torch.arange(x.shape[1], device=x.device)
        hidden = self.embed(x)
        # of the rows that were there before
        cache = cache or Cache()
        for layer in self.layers:
            hidden = layer(hidden, positions, cache=cache)
        # a factor for each feature
        hidden = hidden * F.softplus(self.scale.weight)
        hidden = self.norm(hidden)
        return Output(last=hidden)


class Encoded(nn.Module):
    """Reads an attribute of what its encoder returns."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.encoder(x)
        return self.head(outputs.last)


class Appending(nn.Module):
    """Fills a list in a loop that no package can run; what reads the list comes from the graph, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        # thirds of the features
        for part in TABLES["split"](self.inner(x)):
            parts.append(part.tanh())
        joined = torch.cat(parts, dim=-1)
        # and the input
        return joined + x


TABLES = {"split": lambda x: x.split([3, 3, 2], dim=-1)}


class ViewOfTransposed(nn.Module):
    """Makes a tensor contiguous that it then views: in the graph, both are a reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        # halves of the features
        h = TABLES["last"](self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2))
        h = h.view(x.shape[0], x.shape[1], 8)
        # the residual
        return h.tanh() + x


TABLES["last"] = lambda x: (x.transpose(1, 2).contiguous(),)[0]
