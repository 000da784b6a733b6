"""Along dp_shard: a parameter that cannot be divided, and a batch norm that does not run in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.messages import missing
from tests.runtime import ranks, scalar_ranks
from tests.runtime.packages import write


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [({"pp": 1, "dp_shard": 2}, "interleaved-1f1b"), ({"pp": 2, "dp_shard": 2}, "1f1b")],
)
def test_a_parameter_without_dimensions_is_whole_on_every_rank(
    shape: dict[str, int], schedule: str, tmp_path: Path
) -> None:
    folder = str(write(scalar_ranks.sketch("LayerNorm"), tmp_path / "scalar"))
    count = shape["pp"] * shape["dp_shard"]
    errors = [pair for row in ranks.run(scalar_ranks.train, count, folder, shape, schedule) for pair in row.items()]
    assert {name for name, _ in errors} == {"scale", "first.weight", "first.bias", "norm.weight", "norm.bias"}
    assert max(error for _, error in errors) < 1e-6


def test_a_batch_norm_that_does_not_run_in_the_dtype_of_computing_is_refused(tmp_path: Path) -> None:
    folder = str(write(scalar_ranks.sketch("BatchNorm1d"), tmp_path / "scalar"))
    for message in ranks.run(scalar_ranks.half_precision, 2, folder):
        assert not missing(message, "torch.bfloat16", "batch norm norm", "torch.float32", "Try: dp_replicate")
