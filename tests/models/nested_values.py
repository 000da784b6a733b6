"""A dict and a tuple go in, positionally and by keyword; a dict that holds a tuple comes out."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Nested(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(
        self,
        pair: tuple[Tensor, Tensor],
        *,
        features: dict[str, Tensor],
        scale: float = 1.0,
        extra: Tensor | None = None,
    ) -> dict[str, Tensor | tuple[Tensor, Tensor | None]]:
        x = self.left(pair[0]) + self.right(pair[1])
        for layer in self.layers:
            x = torch.tanh(layer(x) + features["bias"]) * scale
        return {"logits": self.head(x), "hidden": (x, extra)}


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Nested()


def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return ((output["logits"] - target) ** 2).mean() + output["hidden"][0].square().mean()


_generator = torch.Generator().manual_seed(0)
_pair = (torch.randn(2, 8, generator=_generator), torch.randn(2, 8, generator=_generator))
example_inputs = ((_pair,), {"features": {"bias": torch.randn(2, 8, generator=_generator)}, "scale": 0.5})
example_target = torch.randn(2, 3, generator=_generator)
