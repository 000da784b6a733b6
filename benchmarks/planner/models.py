"""The models: the tutorial's transformer, a small Llama and a U-Net, each with a loss and one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.small_llama import cross_entropy, small_llama
from examples import transformer, unet

ROWS, LENGTH, VOCABULARY = 4, 128, 16384


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
    model = small_llama(VOCABULARY)
    tokens = torch.randint(VOCABULARY, (2, ROWS, LENGTH))
    return Subject(model, (tokens[0],), cross_entropy, tokens[1])


def u_net() -> Subject:
    """The U-Net of examples/unet.py, twice as wide, on images four times as large."""
    torch.manual_seed(0)
    images, target = torch.randn(4, 3, 64, 64), torch.randint(unet.CLASSES, (4, 64, 64))
    return Subject(unet.UNet(width=32), (images,), unet.loss_fn, target)


SUBJECTS = {"tutorial": tutorial, "llama": llama, "u-net": u_net}
