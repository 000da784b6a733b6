"""Parts of a tensor in the rows of a message."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from pipegraph.runtime.parameter_collectives import PartLayout


def test_a_smaller_last_part_is_filled_up() -> None:
    layout = PartLayout((5,), 0, 2)
    rows = torch.empty(2, 3)
    layout.write(torch.arange(5.0), rows)
    assert rows.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert layout.part_in(rows[1], 2).tolist() == [3, 4]


@pytest.mark.parametrize("shape", [(4, 3), (5, 3), (1, 3), (3, 4, 2), (0, 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_those_of_chunk_and_make_up_the_whole(shape: tuple[int, ...], dim: int) -> None:
    """Also where some ranks, or all, have nothing, and where the rows of others lie in between."""
    tensor, layout = torch.rand(shape), PartLayout(shape, dim, 3)
    _, rows, _ = torch.zeros(3, layout.length + 2).split([1, layout.length, 1], dim=1)
    layout.write(tensor, rows)
    for part, row in zip(tensor.chunk(3, dim), rows, strict=False):
        assert_close(layout.part_in(row, part.shape[dim]), part)
    again = torch.empty(shape)
    layout.read(rows, again)
    assert_close(again, tensor)
