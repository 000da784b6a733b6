"""The models: a small Llama with its own tensor-parallel plan, and two layers that are quick to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.small_llama import cross_entropy, small_llama

VOCABULARY = 1024


@dataclass(frozen=True)
class Subject:
    """A model with its loss and tensor-parallel plan, and a function from a number of rows to inputs and target."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    tp_plan: Mapping[str, str]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def llama() -> Subject:
    """Eight layers of width 256, 128 tokens a row."""
    from pipegraph.graph.sources.huggingface import tp_plan_of

    model = small_llama(VOCABULARY)

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randint(VOCABULARY, (rows, 128)), torch.randint(VOCABULARY, (rows, 128))

    return Subject(model, cross_entropy, tp_plan_of(model), batch)


class Layer(nn.Module):
    """A feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def layers() -> Subject:
    """Four feed-forward layers of width 32."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(32) for _ in range(4)))
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    return Subject(model, F.mse_loss, plan, lambda rows: (torch.randn(rows, 32), torch.randn(rows, 32)))


SUBJECTS = {"llama": llama, "layers": layers}
