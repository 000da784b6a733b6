"""The cases that are trained and compared: models, their cuts, and options. Importing this module builds no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).parents[2]

IN_ONE_PROCESS = (3,)
IN_PROCESSES = (2, 4)
STAGES = (*IN_ONE_PROCESS, *IN_PROCESSES)
SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def of_tokens(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def of_named_tokens(output: Mapping[str, Tensor], target: Tensor) -> Tensor:
    return of_tokens(output["logits"], target)


def of_nested(output: Mapping[str, Any], target: Tensor) -> Tensor:
    return (output["logits"] - target).square().mean() + output["hidden"][0].square().mean()


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclass(frozen=True)
class Model:
    """A model file, and its cuts for each number of stages: points, or equal segments.

    `rows` and `tokens` cut the example inputs.
    """

    source: str
    cuts: Mapping[int, str]
    loss: Callable[..., Tensor]
    rows: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Case:
    """How a model is trained: two optimizer steps of `batches` batches each.

    The unsplit model takes a batch as a whole, or (`by_microbatch`) in the pieces that the pipeline takes.
    """

    model: str
    microbatches: int = 4
    batches: int = 1
    training: bool = True
    by_microbatch: bool = False
    rounding: float = 1.0
    """How many times as much as other cases it may differ."""


EQUAL = "equal segments"

MODELS: dict[str, Model] = {
    "transformer": Model(
        "examples/transformer.py:build_tiny_model",
        {2: "layers.4", 3: EQUAL, 4: "layers.2,layers.3.multihead_attn,layers.5:end"},
        of_tokens,
        rows=1,
        tokens=16,
    ),
    "llama": Model(  # head and embedding tied
        "tests/models/llama.py",
        {2: "model.layers.1.mlp", 3: "model.layers.0:end,model.layers.2.self_attn", 4: EQUAL},
        of_named_tokens,
        rows=1,
        tokens=12,
    ),
    "unet": Model(
        "examples/unet.py",
        {2: "bottom", 3: "down.2,up.1", 4: "down.0:end,bottom,up.1.convolution"},
        F.cross_entropy,
        rows=1,
    ),
    "t5": Model(
        "tests/models/t5.py",
        {2: "t5.decoder", 3: EQUAL, 4: "t5.encoder.block.1.layer.1,t5.decoder,t5.decoder.block.0:end"},
        of_tokens,
    ),
    "rotary": Model(
        "tests/models/rotary.py",
        {2: "layers.2.mlp", 3: "layers.2,layers.4", 4: "layers.0:end,layers.3,layers.4.mlp"},
        of_tokens,
    ),
    "nested values": Model("tests/models/nested_values.py", {2: "layers.1", 3: EQUAL, 4: EQUAL}, of_nested),
    "late input": Model("tests/models/late_input.py", {2: EQUAL, 3: EQUAL, 4: "layers.1,layers.3,gate"}, squared),
    "masked": Model("tests/models/masked.py", {2: "layers.0:end", 3: EQUAL, 4: EQUAL}, of_tokens),
    "batch norm": Model("tests/models/batch_norm.py", {2: "layers.1.1", 3: EQUAL, 4: EQUAL}, squared),
    "dropout": Model("tests/models/dropout.py", {2: "layers.1:end", 3: EQUAL, 4: EQUAL}, squared),
}

CASES: dict[str, Case] = {
    # Rounding decides on which side of zero some of its ReLUs fall in the second step, so it has to be the same.
    "transformer": Case("transformer", by_microbatch=True),
    "llama": Case("llama"),
    "llama accumulated": Case("llama", batches=2),
    "unet": Case("unet"),
    "t5": Case("t5"),
    "rotary": Case("rotary"),
    "nested values": Case("nested values"),
    "late input": Case("late input"),
    "late input 1 microbatch": Case("late input", microbatches=1),
    "late input 2 microbatches": Case("late input", microbatches=2),
    "late input 7 microbatches": Case("late input", microbatches=7),
    "masked": Case("masked"),
    # A bias before a batch norm has a gradient of rounding alone, which a divided backward may round otherwise.
    "batch norm": Case("batch norm", by_microbatch=True, rounding=20),
    "dropout in evaluation mode": Case("dropout", training=False),
}


def schedule_of(case: str, stages: int) -> str:
    """A Latin square: every case runs under every schedule, and every schedule with all numbers of stages."""
    return SCHEDULES[(list(CASES).index(case) + stages) % len(SCHEDULES)]
