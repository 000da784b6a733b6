"""The models: a small Llama with its own tensor-parallel plan, and two layers that are quick to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Subject:
    """A model with its loss and tensor-parallel plan, and inputs and target of so many rows."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    tp_plan: Mapping[str, str]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def llama() -> Subject:
    """Eight layers of width 256, 64 tokens a row."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipegraph.graph.sources.huggingface import tp_plan_of

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randint(1024, (rows, 64)), torch.randint(1024, (rows, 64))

    return Subject(model, _cross_entropy, tp_plan_of(model), batch)


def _cross_entropy(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


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
