"""What `pipegraph.integrations.torchtitan` uses of torchtitan 0.3, which CI cannot install next to transformers 5.

Names and signatures are those of its source; `test_torchtitan_trainer.py` runs the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, TOKENS, LENGTH = 8, 20, 6


class CrossEntropyLoss:
    def __call__(
        self, logits: Tensor, labels: Tensor, tokens: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        return loss if tokens is None else loss / tokens, {}


class ChunkedLossWrapper(CrossEntropyLoss):
    pass


class FlexAttention:
    @dataclass
    class Config:
        pass


class VarlenAttention:
    @dataclass
    class Config:
        pass


def install() -> None:
    """Put the stand-in in the place of torchtitan."""
    loss = ModuleType("torchtitan.components.loss")
    loss.__dict__.update(IGNORE_INDEX=-100, ChunkedLossWrapper=ChunkedLossWrapper)
    attention = ModuleType("torchtitan.models.common.attention")
    attention.__dict__.update(FlexAttention=FlexAttention, VarlenAttention=VarlenAttention)
    for module in (loss, attention):
        parts = module.__name__.split(".")
        for place in range(1, len(parts)):
            name = ".".join(parts[:place])
            sys.modules.setdefault(name, ModuleType(name))
        sys.modules[module.__name__] = module


# ---- model -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Two projections in one weight, which a state dict has as two; and a table, which it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.register_buffer("table", torch.empty(LENGTH, WIDTH), persistent=False)
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        gate, value = self.fused(x).chunk(2, -1)
        return x + torch.tanh(gate) * value * self.table[positions]

    def compute_table(self, *, buffer_device: torch.device | None = None) -> None:
        steps = torch.arange(LENGTH * WIDTH, dtype=torch.float32, device=buffer_device)
        self.table = torch.cos(steps).view(LENGTH, WIDTH)


def _split(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    state[f"{prefix}gate.weight"], state[f"{prefix}value.weight"] = state.pop(f"{prefix}fused.weight").chunk(2)


def _join(module: nn.Module, state: dict[str, Tensor], prefix: str, *unused: Any) -> None:
    if f"{prefix}gate.weight" in state:
        halves = [state.pop(f"{prefix}{part}.weight") for part in ("gate", "value")]
        state[f"{prefix}fused.weight"] = torch.cat(halves)


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleDict({str(layer): Layer() for layer in range(layers)})
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, positions)
        return self.lm_head(x)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, 0.1 if "fused" in name else 0.2)
        for layer in self.layers.values():
            layer.compute_table(buffer_device=buffer_device)


def whole_model(state: dict[str, Tensor] | None = None, layers: int = 4) -> Decoder:
    model = Decoder(layers)
    model.init_weights(torch.device("cpu"))
    if state is not None:
        model.load_state_dict(state)
    return model


# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass
class Configuration:
    """The arguments of a ``pipelining_fn``, with torchtitan's defaults."""

    dump_folder: str
    ranks: int
    layers: int = 4
    dp_shard: int = 1
    tp: int = 1
    attention: Any = None
    parallelism: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    loss_fn: Any = field(default_factory=CrossEntropyLoss)

    def arguments(self) -> dict[str, Any]:
        pp = self.ranks // self.dp_shard
        layer = SimpleNamespace(inner_attention=self.attention)
        parallelism = {
            "module_fqns_per_model_part": None,
            "pipeline_parallel_first_stage_less_layers": 1,
            "pipeline_parallel_last_stage_less_layers": 1,
            "pipeline_parallel_layers_per_stage": None,
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_schedule_csv": "",
            "pipeline_parallel_microbatch_size": 2,
        }
        training = {"local_batch_size": 8, "seq_len": LENGTH, "mixed_precision_param": "float32"}
        return {
            "parallel_dims": SimpleNamespace(pp=pp, dp_replicate=1, dp_shard=self.dp_shard, tp=self.tp, cp=1, ep=1),
            "training": SimpleNamespace(**training | self.training),
            "parallelism": SimpleNamespace(**parallelism | self.parallelism),
            "compile_config": None,
            "ac_config": None,
            "dump_folder": self.dump_folder,
            "device": torch.device("cpu"),
            "model_config": SimpleNamespace(first_attention=layer, layers=[layer] * self.layers),
            "parallelize_fn": None,
            "loss_fn": self.loss_fn,
        }


def batches(rank: int, ranks: int, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Microbatches of two rows: tokens, positions and labels, of which some do not count."""
    for number in range(count):
        generator = torch.Generator().manual_seed(rank + ranks * number)
        tokens = torch.randint(TOKENS, (2, LENGTH), generator=generator)
        labels = torch.where(torch.rand(2, LENGTH, generator=generator) < 0.3, -100, tokens.roll(-1, 1))
        yield tokens, torch.arange(LENGTH).repeat(2, 1), labels
