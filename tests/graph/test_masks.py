"""Masks that are a band of the matrix are known as one, and others are not."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.graph.passes.constants import _ends

SIZES = st.integers(2, 6)


@given(SIZES, SIZES, st.integers(-5, 5), st.integers(-5, 5), st.integers(0, 99))
def test_a_band_and_what_is_none(rows: int, columns: int, lowest: int, highest: int, spoilt: int) -> None:
    offsets = torch.arange(columns) - torch.arange(rows)[:, None]
    mask = (offsets >= lowest) & (offsets <= highest)
    held = offsets[mask]
    found = _ends(mask.expand(2, 1, rows, columns))
    assert (found is None) == (not held.numel())
    if found is not None:
        lowest, highest = int(held.min()), int(held.max())
        assert found == (None if lowest == 1 - rows else lowest, None if highest == columns - 1 else highest)
    other = mask.clone()
    other.view(-1)[spoilt % mask.numel()] ^= True
    held = offsets[other]
    is_band = bool(held.numel()) and torch.equal(other, (offsets >= held.min()) & (offsets <= held.max()))
    assert (_ends(other) is not None) == is_band
    assert _ends(torch.stack([mask, other])) is None
