"""A Hugging Face Llama whose head is tied to its embedding, taking ``input_ids`` by keyword."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

CONFIG = Path(__file__).parent / "tied_llama"


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIG))


def loss_fn(output: object, target: Tensor) -> Tensor:
    # The model returns a ModelOutput, a stage the same mapping as a plain dict.
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())  # type: ignore[index]


_generator = torch.Generator().manual_seed(0)
example_inputs = {"input_ids": torch.randint(97, (2, 12), generator=_generator)}
example_target = torch.randint(97, (2, 12), generator=_generator)
