"""Cases that `make test` leaves out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

# Schedules of no other actions than gpipe, 1f1b, interleaved-1f1b, zb-h1 and zb-v have.
LIKE_OTHERS = ("dualpipe-v", "eager-1f1b", "interleaved-zb", "looped-bfs", "v-half", "v-min", "zb-h2")


def cases(values: Sequence[Any], slow: Collection[Any]) -> list[Any]:
    """``values`` of `parametrize`, of which those in ``slow`` are for `make test-all`: others show the same sooner."""
    return [
        pytest.param(*case if isinstance(case, tuple) else (case,), marks=[pytest.mark.slow] if case in slow else [])
        for case in values
    ]
