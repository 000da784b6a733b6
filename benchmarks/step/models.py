"""The models, each with the batch and the loss of a step, and its stages for systems that take modules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples import unet


@dataclass(frozen=True)
class Case:
    """A model and the size of its step."""

    microbatches: int = 8
    rows: int = 4
    """of a microbatch"""
    tolerance: float = 1e-3
    """of a gradient, as a part of its norm: kernels of float32 differ by some 1e-6"""

    @property
    def name(self) -> str:
        """What figures of this case are kept under."""
        raise NotImplementedError

    @property
    def places(self) -> tuple[str, ...]:
        """The split points between layers, in the model's order."""
        raise NotImplementedError

    def build(self) -> nn.Module:
        """Return the model with random weights, the same in every process."""
        raise NotImplementedError

    def part(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """Return what lies between two places as a module that shares the model's. It takes what the last one returns.

        0 is the model's start, n the n-th place, and one more than there are places the model's end.
        """
        raise NotImplementedError

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step, the same in every process."""
        raise NotImplementedError

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of one microbatch."""
        raise NotImplementedError

    def microbatch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the first microbatch."""
        inputs, targets = self.batch()
        return inputs[: self.rows], targets[: self.rows]

    def unsplit(self, model: nn.Module) -> nn.Module:
        """Return the model, unsplit."""
        return self.part(model, 0, len(self.places) + 1)

    def parts(self, model: nn.Module, cuts: Sequence[str]) -> list[nn.Module]:
        """Return the stages of a model that is cut at these places."""
        bounds = [0, *(self.places.index(cut) + 1 for cut in cuts), len(self.places) + 1]
        return [self.part(model, start, stop) for start, stop in itertools.pairwise(bounds)]

    def even(self, stages: int) -> tuple[str, ...]:
        """Return the cuts that give every stage the same number of layers: what users begin with."""
        layers = len(self.places)  # the head counts as none
        return tuple(self.places[layers * stage // stages - 1] for stage in range(1, stages))


@dataclass(frozen=True)
class LlamaCase(Case):
    """A small Llama with the proportions of one of 1 B: 8 layers of width 256, and a head as large as four of them."""

    vocabulary: int = 16384
    layers: int = 8
    width: int = 256
    sequence: int = 128

    @property
    def name(self) -> str:
        return f"llama, vocabulary {self.vocabulary}, {self.microbatches} microbatches"

    @property
    def places(self) -> tuple[str, ...]:
        return *(f"layers.{layer}" for layer in range(1, self.layers)), "norm"

    def build(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=self.sequence,
            tie_word_embeddings=False,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def part(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        return _LlamaPart(model, start, stop)

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = (self.microbatches * self.rows, self.sequence)
        tokens, targets = (torch.randint(0, self.vocabulary, shape, generator=generator) for _ in range(2))
        return tokens, targets

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class _LlamaPart(nn.Module):
    def __init__(self, model: Any, start: int, stop: int) -> None:
        super().__init__()
        layers = model.model.layers
        self.embed_tokens = model.model.embed_tokens if start == 0 else None
        self.rotary_emb = model.model.rotary_emb
        self.layers = nn.ModuleDict({str(index): layers[index] for index in range(start, min(stop, len(layers)))})
        ends = stop > len(layers)
        self.norm = model.model.norm if ends else None
        self.lm_head = model.lm_head if ends else None

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.embed_tokens is None else self.embed_tokens(x)
        rotary = self.rotary_emb(h, torch.arange(h.shape[1], device=h.device)[None])
        for layer in self.layers.values():
            h = layer(h, position_embeddings=rotary)
        return h if self.norm is None or self.lm_head is None else self.lm_head(self.norm(h))


@dataclass(frozen=True)
class UNetCase(Case):
    """The U-Net of examples/unet.py, twice as wide, on images of four times the area: skips pass over stages."""

    width: int = 32
    side: int = 64
    tolerance: float = 5e-3
    """Rounding decides which of almost equal pixels a pool takes: in float32 gradients are up to 5e-4 off those in
    float64 in torch's own kernels, and 1.3e-3 in compiled ones (8 microbatches)."""

    @property
    def name(self) -> str:
        return f"unet, {self.microbatches} microbatches"

    @property
    def places(self) -> tuple[str, ...]:
        return "down.1", "down.2", "bottom", "up.0", "up.1", "up.2", "head"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return unet.UNet(self.width)

    def part(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        return _UNetPart(model, start, stop)

    def unsplit(self, model: nn.Module) -> nn.Module:
        return model

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = (self.side, self.side)
        images = torch.randn(self.microbatches * self.rows, 3, *shape, generator=generator)
        return images, torch.randint(unet.CLASSES, (len(images), *shape), generator=generator)

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return unet.loss_fn(outputs, targets)


class _UNetPart(nn.Module):
    """Skips are handed on from part to part, because torch's and DeepSpeed's stages only talk to their neighbours.

    Neither can send a gradient that is not contiguous, such as that of a part of a concatenation: hence the view of a
    view. Nor can torch detach a view when it divides the backward: hence the clone of the skips.
    """

    def __init__(self, model: Any, start: int, stop: int) -> None:
        super().__init__()
        positions = range(start, stop)
        self.pool = model.pool
        self.down = nn.ModuleDict({str(index): model.down[index] for index in range(3) if index in positions})
        self.bottom = model.bottom if 3 in positions else None
        self.up = nn.ModuleDict({str(index): model.up[index] for index in range(3) if index + 4 in positions})
        self.head = model.head if 7 in positions else None

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor | tuple[Tensor, ...]:
        x, *waiting = (tensor.flatten().view(tensor.shape) for tensor in (x, *skips))
        for down in self.down.values():
            x = down(x)
            waiting.append(x)
            x = self.pool(x)
        if self.bottom is not None:
            x = self.bottom(x)
        for up in self.up.values():
            x = up(x, waiting.pop())
        if self.head is not None:
            x = self.head(x)
        return (x, *(skip.clone() if at < len(skips) else skip for at, skip in enumerate(waiting))) if waiting else x
