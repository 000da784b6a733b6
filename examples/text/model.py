"""A small GPT that learns Python byte by byte, from the source of Python's own library.

    pipegraph split examples/text/model.py --points layers.2 -o build/text/two
    pipegraph run build/text/two --model examples/text/model.py --steps 400 --checkpoint build/text/run

``make train`` does that. ``run`` takes from here ``loss_fn``, ``metrics``, ``data``, ``evaluation_data``, ``optimizer``
and ``scheduler``.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
CONTEXT = 128  # bytes that the model sees
ROWS = 32  # of a step, over all data-parallel ranks
WIDTH, HEADS, LAYERS = 128, 4, 4


class Layer(nn.Module):
    """Causal attention and a perceptron, each with a residual connection: ``[batch, bytes, WIDTH]`` → the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes ``[batch, bytes]`` → logits of the bytes that follow them ``[batch, bytes, BYTES]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def metrics(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (logits.argmax(-1) == target).float().mean()}


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1)


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=50)


def data(rank: int, world: int) -> Windows:
    return Windows(read_text(is_held_out=False), rank, world)


def evaluation_data(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    batches = iter(Windows(read_text(is_held_out=True), rank, world))
    return [next(batches) for _ in range(4)]


class Windows:
    """Endless batches of random windows of a text, the same for any number of ranks that share their rows.

    Its state is its position, so that a resumed run sees the batches that it has not seen.
    """

    def __init__(self, text: Tensor, rank: int, world: int) -> None:
        self.text, self.rank, self.world, self.step = text, rank, world, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.step)
            starts = torch.randint(len(self.text) - CONTEXT, (ROWS,), generator=generator)[self.rank :: self.world]
            windows = self.text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
            self.step += 1
            yield windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def read_text(is_held_out: bool) -> Tensor:
    """The bytes of the modules of Python's library [bytes, uint8]; every tenth module is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [file for place, file in enumerate(files) if (place % 10 == 9) == is_held_out]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8)


# One microbatch: 8 windows.
example_inputs = (torch.randint(BYTES, (8, CONTEXT), generator=torch.Generator().manual_seed(0)),)
example_target = example_inputs[0].roll(-1, 1)
