"""The models: the tutorial's transformer, a small Llama and a U-Net, each with a loss and one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import transformer, unet

ROWS, LENGTH = 4, 128


@dataclass(frozen=True)
class Subject:
    """A model with its loss, and inputs and target of one microbatch."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any, Any], Tensor]
    target: Tensor


def tutorial() -> Subject:
    """The decoder of PyTorch's tutorial, as examples/transformer.py has it: 8 sequences of 128 tokens."""
    loss = transformer.loss_fn
    return Subject(transformer.build_model(), transformer.example_inputs, loss, transformer.example_target)


def llama() -> Subject:
    """Eight layers of width 256; the head on 16 384 words takes as long as three of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    tokens = torch.randint(config.vocab_size, (2, ROWS, LENGTH))
    return Subject(LlamaForCausalLM(config), (tokens[0],), llama_loss, tokens[1])


def llama_loss(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of the logits."""
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def u_net() -> Subject:
    """The U-Net of examples/unet.py, twice as wide, on images four times as large."""
    torch.manual_seed(0)
    images, target = torch.randn(4, 3, 64, 64), torch.randint(unet.CLASSES, (4, 64, 64))
    return Subject(unet.UNet(width=32), (images,), unet.loss_fn, target)


SUBJECTS = {"tutorial": tutorial, "llama": llama, "u-net": u_net}
