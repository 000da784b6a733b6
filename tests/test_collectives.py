"""Rows that ranks gather and add up over gloo, compared with the expected values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegraph import collectives
from tests.runtime import ranks

RANKS = 3
SIZES = {"none": 0, "small": 5, "large": collectives._LARGE // (4 * RANKS) + 1}


def gather(rank: int, size: int) -> tuple[bool, bool, int]:
    """Whether each row arrived, whether the future of the messages was done then, and how many of these there were."""
    rows = torch.full((RANKS, size), -1.0)
    rows[rank] = torch.arange(size) + rank
    works = collectives.start_gather(rows, rank, dist.group.WORLD)
    future = works.get_future()
    works.wait()
    future.wait()
    expected = torch.arange(size) + torch.arange(RANKS)[:, None]
    return torch.equal(rows, expected.float()), bool(works.is_completed()), len(getattr(works, "_works", [works]))


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_gathers_the_rows_of_all(size: str) -> None:
    messages = RANKS if size == "large" else 1
    assert ranks.run(gather, RANKS, SIZES[size]) == [(True, True, messages)] * RANKS


def reduce(rank: int, size: int, dtype: torch.dtype) -> Any:
    """The sum of this rank's row."""
    rows = (torch.arange(RANKS)[:, None] + 10 * rank + torch.zeros(size)).to(dtype)
    work, own_sum = collectives.start_reduce(rows, dist.group.WORLD)
    work.wait()
    row_sum = own_sum()
    assert row_sum.dtype == dtype
    assert row_sum.untyped_storage().nbytes() == size * dtype.itemsize  # not the memory of all rows
    return set(row_sum.float().tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", ["small", "large"])
def test_each_rank_gets_the_sum_of_its_row(size: str, dtype: torch.dtype) -> None:
    assert ranks.run(reduce, RANKS, SIZES[size], dtype) == [{30.0 + 3 * row} for row in range(RANKS)]


def meet_no_one(rank: int) -> str:
    """What a rank hears whose partner leaves before the messages."""
    if rank:
        return ""
    try:
        collectives.start_gather(torch.zeros(2, SIZES["large"]), rank, dist.group.WORLD).wait()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_is_gone_is_an_error() -> None:
    heard = ranks.run(meet_no_one, 2)[0]
    assert "onnection closed by peer" in heard or "Connection reset" in heard
