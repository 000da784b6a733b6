r"""Module and parameter names that are no identifiers: keywords, quotes, newlines, braces, and code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LAYERS = ["class", 'a"b', "it's", "new\nline", "{{ x }}", '"""', "\\", '"); raise SystemExit("', "self", "0"]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"lambda": torch.randn(width), "x y": torch.randn(width)})
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.weights["lambda"] + self.weights["x y"])


class HostileNames(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Layer(width) for name in LAYERS})
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers.values():
            x = layer(x)
        return {'quoted "key"\n': self.head(x)}


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return HostileNames()


def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return (output['quoted "key"\n'] - target).square().mean()


_generator = torch.Generator().manual_seed(0)
example_inputs = (torch.randn(4, 8, generator=_generator),)
example_target = torch.randn(4, 2, generator=_generator)
