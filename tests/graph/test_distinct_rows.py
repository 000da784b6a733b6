"""A batch whose rows all differ, from an example whose rows may be equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipegraph.graph.batch.value_proof import distinct_rows


def batch_of(tensor: Tensor, rows: int = 5, dim: int | None = 0) -> Tensor:
    return distinct_rows([tensor], [dim], rows)[0]


def are_distinct(batch: Tensor, example: Tensor) -> bool:
    """Whether no two rows are equal, and none is a row of the example."""
    rows = [*batch, *torch.unique(example, dim=0)]
    return len(torch.unique(torch.stack(rows), dim=0)) == len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_get_noise_within_their_range(dtype: torch.dtype) -> None:
    example = torch.rand(1, 8, generator=torch.Generator().manual_seed(0)).to(dtype).expand(2, 8)
    batch = batch_of(example)
    assert batch.shape == (5, 8) and batch.dtype == dtype and are_distinct(batch, example)
    assert example.amin() <= batch.amin() and batch.amax() <= example.amax()


def test_integers_are_rolled() -> None:
    example = torch.tensor([[7, 3, 3, 9, 1, 2]]).expand(2, 6)
    batch = batch_of(example)
    assert are_distinct(batch, example)
    assert torch.equal(batch.sort(1).values, example.sort(1).values[:1].expand(5, 6))


def test_a_mask_of_ones_gets_tails() -> None:
    for mask in (torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 6)):
        batch = batch_of(mask, rows=4)
        assert batch.sum(1).tolist() == [6, 5, 4, 3]
        assert bool((batch[:, 0] == 1).all()) and batch.dtype == mask.dtype


def test_a_long_mask_gets_long_tails() -> None:
    assert batch_of(torch.ones(1, 12, dtype=torch.long), rows=3).sum(1).tolist() == [12, 8, 4]


def test_a_padding_mask_without_padding_gets_tails() -> None:
    batch = batch_of(torch.zeros(2, 6, dtype=torch.bool), rows=3)
    assert batch.sum(1).tolist() == [0, 2, 4] and not batch[:, 0].any()


def test_a_mask_of_other_values_is_rolled() -> None:
    causal = torch.full((1, 4, 4), -torch.inf).triu(1)
    batch = batch_of(causal, rows=3)
    assert torch.equal((batch == 0).sum(2), (causal == 0).sum(2).expand(3, 4))  # none sees nothing
    keep = torch.tensor([[True, True, False]])
    assert torch.equal(batch_of(keep, rows=2).sum(1), torch.tensor([2, 2]))


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_a_mask_with_padding_at_the_end_gets_tails(dtype: torch.dtype) -> None:
    batch = batch_of(torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).to(dtype), rows=4)
    assert batch.sum(1).tolist() == [4, 3, 2, 1] and bool((batch[:, 0] == 1).all()) and batch.dtype == dtype


def test_padding_of_tokens_stays_at_the_end() -> None:
    """A row does not begin with padding: under a causal mask, its first token would see nothing."""
    tokens = torch.tensor([[4, 5, 6, 7, 8], [1, 2, 3, 0, 0]])
    batch = batch_of(tokens, rows=5)
    assert torch.equal(batch_of(tokens.t(), rows=5, dim=1), batch.t())  # time first
    assert batch[1::2].tolist() == [[3, 1, 2, 0, 0], [2, 3, 1, 0, 0]]
    assert len(torch.unique(batch, dim=0)) == 5 and bool((batch[:, 0] != 0).all())


def test_positions_stay() -> None:
    positions = torch.arange(6).expand(3, 2, 6)
    assert torch.equal(batch_of(positions, rows=4, dim=1), torch.arange(6).expand(3, 4, 6))


def test_floats_of_one_value() -> None:
    zeros, halves = batch_of(torch.zeros(1, 4)), batch_of(torch.full((1, 4), 0.5))
    assert are_distinct(zeros, torch.zeros(1, 4)) and are_distinct(halves, torch.full((1, 4), 0.5))
    assert zeros.amin() >= 0 and zeros.amax() <= 0.5 and halves.amin() >= 0.25 and halves.amax() <= 0.5


def test_labels_keep_their_values() -> None:
    labels = torch.tensor([4, 2, 8])
    batch = batch_of(labels, rows=7)
    assert set(batch.tolist()) == {2, 4, 8} and batch.tolist()[:3] != [4, 2, 8]
    assert set(batch_of(torch.tensor([0.0, 1.0]), rows=5).tolist()) == {0.0, 1.0}


def test_rows_of_all_tensors_belong_together() -> None:
    """Some are along another dimension, have several entries for a row, or have none."""
    time_first, heads = torch.randn(6, 2, 4), torch.randn(4, 3)
    table = torch.randn(3)
    first, second, third, text = distinct_rows([time_first, heads, table, "text"], [1, 0, None, None], 3)
    assert first.shape == (6, 3, 4) and second.shape == (6, 3) and first.is_contiguous()
    assert torch.equal(third, table) and third.data_ptr() != table.data_ptr() and text == "text"


def test_the_same_arguments_give_the_same_rows() -> None:
    example = torch.randn(2, 4)
    assert torch.equal(batch_of(example), batch_of(example))
    assert not torch.equal(distinct_rows([example], [0], 3, seed=1)[0], distinct_rows([example], [0], 3)[0])


def test_tensors_of_other_numbers_of_rows() -> None:
    with pytest.raises(ValueError, match="3 rows"):
        distinct_rows([torch.ones(2), torch.ones(3)], [0, 0], 4)
