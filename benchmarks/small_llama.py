"""The small Llama of the planner's benchmarks, and its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def small_llama(vocabulary: int) -> nn.Module:
    """Return eight layers of width 256 with random weights, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    """Return the mean cross entropy of the logits."""
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())
