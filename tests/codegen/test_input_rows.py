"""Which inputs are cut into microbatches with the first one, and which go whole to each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import BatchError
from tests.codegen.parity import split

BATCH, LENGTH = 3, 13  # primes, which no other number of these models is


class Scored(nn.Module):
    """A language model that is given its targets, flattens them as its outputs, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embedding(tokens))[:, :-1]
        return logits, F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets[:, 1:].reshape(-1))


def test_targets_that_are_flattened_as_outputs_are_have_their_sizes(tmp_path: Path) -> None:
    tokens, targets = torch.randint(20, (2, 4 * BATCH, LENGTH))
    model = Scored()
    package = split(tmp_path, model, (tokens[:BATCH], targets[:BATCH]), cut="head")
    assert package.manifest.values["targets"].shape == package.manifest.values["tokens"].shape == ("batch", "tokens_1")
    pipe = pipegraph.Pipeline(package, microbatches=4, loss_fn=lambda output, _: output[1], kernels="eager")
    loss = pipe.step(tokens, targets).loss
    torch.testing.assert_close(loss, model(tokens, targets)[1].detach())


class Towers(nn.Module):
    """Returns features of two inputs; no operation requires them to have the same number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Linear(4, 8)

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(images), self.text(texts)


def similarity(output: tuple[Tensor, Tensor], _: object = None) -> Tensor:
    return (output[0] @ output[1].t()).square().mean()


def test_every_input_with_rows_that_are_returned_is_cut(tmp_path: Path) -> None:
    images, texts = torch.randn(4 * BATCH, 6), torch.randn(4 * BATCH, 4)
    model = Towers()
    package = split(tmp_path, model, (images[:BATCH], texts[:BATCH]), cut="text")
    options = {"loss_fn": similarity, "loss_over": "microbatch", "kernels": "eager"}
    pipe = pipegraph.Pipeline(package, microbatches=4, **options)
    loss = torch.stack([similarity(model(*pair)) for pair in zip(images.chunk(4), texts.chunk(4), strict=True)])
    torch.testing.assert_close(pipe.step(images, texts).loss, loss.mean().detach())
    with pytest.raises(BatchError, match="dynamic_shapes"):
        pipe.eval(images, texts[:7], microbatches=1)


class Prototypes(nn.Module):
    """Compares every row with every row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.scale(self.embed(x)) @ table.t()


def test_a_table_with_as_many_rows_as_the_batch_is_not_cut(tmp_path: Path) -> None:
    x, table = torch.randn(2 * BATCH, 6), torch.randn(BATCH, 8)
    model = Prototypes()
    package = split(tmp_path, model, (x[:BATCH], table), cut="scale")
    pipe = pipegraph.Pipeline(package, microbatches=2, kernels="eager")
    torch.testing.assert_close(pipe.eval(x, table), model(x, table).detach())
