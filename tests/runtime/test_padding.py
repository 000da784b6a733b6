"""`pad_to`: lengths are rounded up, and the numbers are those of the unpadded batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import ArgumentError, BatchError
from tests.messages import refused


class Masked(nn.Module):
    """Attention over the tokens that a mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = self.mid(self.embed(tokens))
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=mask[:, None].bool())
        return self.head(h)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def count(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> pipegraph.Package:
    torch.manual_seed(0)
    captured = pipegraph.capture(Masked(), (torch.randint(20, (2, 6)), torch.ones(2, 6, dtype=torch.long)))
    return pipegraph.write_package(pipegraph.plan(captured, points=["head"]), tmp_path_factory.mktemp("masked") / "out")


def pipeline(package: pipegraph.Package, **options: object) -> pipegraph.Pipeline:
    return pipegraph.Pipeline(package, "1f1b", 4, loss_fn=loss_fn, loss_weight=count, kernels="eager", **options)


def test_microbatches_of_other_lengths_are_padded_to_one(package: pipegraph.Package) -> None:
    tokens = [torch.randint(20, (2, length)) for length in (5, 8, 6, 3)]
    masks = [torch.ones_like(item) for item in tokens]
    plain, padded = pipeline(package), pipeline(package, pad_to={"tokens_1": 8})
    expected = plain.step(tokens, masks, target=tokens)
    result = padded.step(tokens, masks, target=tokens, return_outputs=True)
    torch.testing.assert_close(result.loss, expected.loss)
    assert result.outputs.shape == (8, 8, 20)
    for index in plain.stages:
        pairs = zip(plain.stages[index].parameters(), padded.stages[index].parameters(), strict=True)
        for plain_parameter, padded_parameter in pairs:
            torch.testing.assert_close(plain_parameter.grad, padded_parameter.grad)
    assert padded.last_sizes is not None
    assert padded.last_sizes.is_even


def test_a_batch_of_one_length_is_padded(package: pipegraph.Package) -> None:
    tokens = torch.randint(20, (8, 5))
    mask = torch.ones_like(tokens)
    expected = pipeline(package).step(tokens, mask, target=tokens).loss
    torch.testing.assert_close(
        pipeline(package, pad_to={"tokens_1": 4}).step(tokens, mask, target=tokens).loss, expected
    )


@pytest.mark.parametrize(
    ("pad_to", "advice"),
    [
        ({"batch": 4}, "tokens_1"),
        ({"length": 4}, "tokens_1"),
        ({"tokens_1": 0}, "whole number"),
        ({"tokens_1": 2.0}, "whole number"),
    ],
)
def test_a_size_that_cannot_be_padded_is_refused(
    package: pipegraph.Package, pad_to: dict[str, int], advice: str
) -> None:
    with refused(ArgumentError, "pad_to", advice=advice):
        pipeline(package, pad_to=pad_to)


def test_floats_of_a_target_are_not_padded(package: pipegraph.Package) -> None:
    tokens = torch.randint(20, (8, 5))
    pipe = pipeline(package, pad_to={"tokens_1": 4})
    with refused(BatchError, "target", "[8, 5]", "pad_to", advice="-100"):
        pipe.step(tokens, torch.ones_like(tokens), target=torch.randn(8, 5))
