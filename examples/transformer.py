"""The decoder of PyTorch's pipelining tutorial: eight layers, 512 wide, a vocabulary of 10 000.

    pipegraph split examples/transformer.py --points layers.4 -o build/transformer

``examples/transformer.py:build_tiny_model`` is the same model 16 times narrower; the inputs fit both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 10_000


class Transformer(nn.Module):
    """Token numbers ``[batch, sequence]`` → logits ``[batch, sequence, VOCABULARY]``."""

    def __init__(self, dim: int = 512, heads: int = 8, layers: int = 8) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, dim)
        # Without dropout a training step is deterministic, so that `pipegraph verify` can compare one.
        self.layers = nn.ModuleDict(
            {
                str(index): nn.TransformerDecoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True)
                for index in range(layers)
            }
        )
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, h)
        return self.output(self.norm(h))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Transformer()


def build_tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(dim=32, heads=2)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


_generator = torch.Generator().manual_seed(0)

# One microbatch: 8 sequences of 128 tokens.
example_inputs = (torch.randint(VOCABULARY, (8, 128), generator=_generator),)
example_target = torch.randint(VOCABULARY, (8, 128), generator=_generator)
