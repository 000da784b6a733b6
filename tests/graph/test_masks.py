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
    band = offsets[mask]
    ends = _ends(mask.expand(2, 1, rows, columns))
    assert (ends is None) == (not band.numel())
    if ends is not None:
        lowest, highest = int(band.min()), int(band.max())
        assert ends == (None if lowest == 1 - rows else lowest, None if highest == columns - 1 else highest)
    spoilt_mask = mask.clone()
    spoilt_mask.view(-1)[spoilt % mask.numel()] ^= True
    band = offsets[spoilt_mask]
    is_band = bool(band.numel()) and torch.equal(spoilt_mask, (offsets >= band.min()) & (offsets <= band.max()))
    assert (_ends(spoilt_mask) is not None) == is_band
    assert _ends(torch.stack([mask, spoilt_mask])) is None
