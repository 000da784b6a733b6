"""Training from a DataLoader whose batches have other lengths, and a smaller last one: as the unsplit model trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import pipegraph
from pipegraph import Pipeline
from tests.runtime import ranks

WORDS, WIDTH, HEADS = 50, 16, 2
STEP_LENGTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(8 * STEP_LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batches(steps: int, step_length: int, last: int) -> Iterator[Tensor]:
    """Batches of 8 rows, the last one of an epoch smaller, each of one of eight lengths."""
    torch.manual_seed(1)
    rows = torch.randint(WORDS, (40 + last, 8 * step_length + 1))
    loader = DataLoader(rows, batch_size=8, shuffle=True)
    for step in range(steps):
        epoch = iter(loader) if step % len(loader) == 0 else epoch  # noqa: F821
        length = step_length * (1 + (5 * step + step // 8) % 8)
        yield next(epoch)[:, : length + 1]


def train(rank: int, folder: str, kernels: str, steps: int, step_length: int, last: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = Transformer()
    pipe = Pipeline(folder, "zb-v", microbatches=3, loss_fn=loss, kernels=kernels)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (pipe, model)]
    for batch in batches(steps, step_length, last):
        tokens, target = batch[:, :-1], batch[:, 1:]
        result = pipe.step(tokens, target=target)
        expected = loss(model(tokens), target)
        expected.backward()
        torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    parameters = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], rtol=1e-3, atol=1e-5)
    return {str(count): count.compilations for count in pipe.kernels_report()}


def assert_trains_as_the_model(
    folder: Path, kernels: str, steps: int, step_length: int, last: int, seconds: float
) -> None:
    torch.manual_seed(0)
    captured = pipegraph.capture(Transformer(), (torch.randint(WORDS, (3, 13)),))
    plan = pipegraph.plan(captured, points=["layers.2", "layers.4", "layers.6"])
    path = pipegraph.write_package(plan, folder / "package").path
    counts = ranks.run(train, 2, str(path), kernels, steps, step_length, last, timeout=seconds)
    for compilations in counts:
        assert len(compilations) == 3, compilations  # two stages, and the layer
        assert set(compilations.values()) == {2}, compilations


def test_lengths_and_a_smaller_last_batch(tmp_path: Path) -> None:
    """The last batch has fewer rows than there are microbatches."""
    assert_trains_as_the_model(tmp_path, "eager", steps=13, step_length=2, last=2, seconds=90)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kernels", "last"), [("eager", 4), ("inductor", 6)])
def test_fifty_steps_of_lengths_from_64_to_512(kernels: str, last: int, tmp_path: Path) -> None:
    """Inductor compiles once more for a microbatch of 1 row, which a batch of 4 would have."""
    assert_trains_as_the_model(tmp_path, kernels, steps=50, step_length=STEP_LENGTH, last=last, seconds=840)
