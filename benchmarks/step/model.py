"""A small Llama with the proportions of one of 1 B: 8 layers of width 256, and a head as large as four of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class StepSetting:
    """Sizes of the model and of a step."""

    vocabulary: int = 16384
    microbatches: int = 8
    layers: int = 8
    width: int = 256
    sequence: int = 128
    rows: int = 4
    """of a microbatch"""

    @property
    def units(self) -> int:
        """Parts between two places where the model may be cut: two in each layer, and the head."""
        return 2 * self.layers + 1

    def point(self, unit: int) -> str:
        """Return the split point that starts a stage at a unit."""
        if unit == self.units - 1:
            return "norm"
        return f"layers.{unit // 2}" + (".post_attention_layernorm" if unit % 2 else "")

    def even(self, stages: int) -> tuple[int, ...]:
        """Return the units that start a stage if every stage has as many layers: what users begin with."""
        return tuple(2 * (self.layers * stage // stages) for stage in range(1, stages))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a step, the same in every process."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.microbatches * self.rows, self.sequence)
        tokens, targets = (torch.randint(0, self.vocabulary, shape, generator=generator) for _ in range(2))
        return tokens, targets


class Part(nn.Module):
    """The units from `start` to `stop` of a Llama, with which it shares modules. Both lie between layers."""

    def __init__(self, model: LlamaForCausalLM, start: int, stop: int) -> None:
        super().__init__()
        layers = model.model.layers
        self.embed_tokens = model.model.embed_tokens if start == 0 else None
        self.rotary_emb = model.model.rotary_emb
        self.layers = nn.ModuleDict({str(index): layers[index] for index in range(start // 2, stop // 2)})
        ends = stop > 2 * len(layers)
        self.norm = model.model.norm if ends else None
        self.lm_head = model.lm_head if ends else None

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.embed_tokens is None else self.embed_tokens(x)
        rotary = self.rotary_emb(h, torch.arange(h.shape[1], device=h.device)[None])
        for layer in self.layers.values():
            h = layer(h, position_embeddings=rotary)
        return h if self.norm is None or self.lm_head is None else self.lm_head(self.norm(h))


def build_model(setting: StepSetting) -> LlamaForCausalLM:
    """The model with random weights, the same in every process: grouped attention (4 to 1) and a fourfold MLP."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.width,
        intermediate_size=4 * setting.width,
        num_hidden_layers=setting.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=setting.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def parts(setting: StepSetting, model: LlamaForCausalLM, cuts: Sequence[int]) -> list[Part]:
    """The stages of a model that is cut at these units."""
    bounds = (0, *cuts, setting.units)
    return [Part(model, start, stop) for start, stop in itertools.pairwise(bounds)]


def source_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of one microbatch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
