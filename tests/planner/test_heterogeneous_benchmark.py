"""The benchmark of models whose layers take unequal times, with a tiny model."""

from __future__ import annotations

import pytest

from benchmarks.heterogeneous import GEMMA, compare, equal_layers


def test_equal_layers_are_megatrons_layout() -> None:
    assert equal_layers(8, 4) == "Ett|tt|tt|ttL"


@pytest.mark.slow
def test_the_planner_is_no_slower_than_equal_layers() -> None:
    """A head of many words makes the last of the equal stages the slowest."""
    tiny = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    steps = compare(GEMMA | tiny | {"num_hidden_layers": 4, "vocab_size": 4096}, ranks=2, microbatches=8, seq=512)
    seconds = {way: step for way, (_, step) in steps.items()}
    limit = seconds.pop("all ranks busy all the time")
    assert min(seconds.values()) == seconds["best of all orders"] <= seconds["best named"] * (1 + 1e-9)
    assert limit <= seconds["best of all orders"] * (1 + 1e-6)
