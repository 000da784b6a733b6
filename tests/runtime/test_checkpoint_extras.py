"""Extra state, with a different value on each rank: which of these values each rank loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegraph.errors import CheckpointError
from pipegraph.runtime.checkpoint.extra_state import version_for
from pipegraph.runtime.checkpoint.folder import SavedExtra
from pipegraph.runtime.processes.rank_grid import RankGrid
from tests.messages import refused, warned
from tests.runtime import checkpoint_models as models
from tests.runtime import checkpoint_ranks, ranks
from tests.runtime.packages import write


def test_every_data_parallel_rank_has_its_own_position(tmp_path: Path) -> None:
    package = write(models.perceptrons(1), tmp_path / "package")
    assert ranks.run(checkpoint_ranks.positions, 2, str(package), str(tmp_path)) == [100, 101]
    alone = models.start(package)
    with refused(CheckpointError, 'extra["data"]', "dp_replicate 2", "pp 1", advice="without extra"):
        alone.pipe.load(tmp_path, extra={"data": models.Position(0)})
    with pytest.warns(UserWarning, match='"data"'):
        assert alone.pipe.load(tmp_path).extra == {"epoch": 3}
    position = models.Position(0)
    with warned('extra["place"]'):
        assert alone.pipe.load(tmp_path / "plain", extra={"data": position}).extra == {}
    assert position.place == 7
    with refused(CheckpointError, 'extra["place"]', advice='extra that lacks "place"'):
        alone.pipe.load(tmp_path / "plain", extra={"data": position, "place": 0})


def test_a_position_goes_by_the_share_of_the_data() -> None:
    saved, saved_grid = SavedExtra(True, (0, 1, 0, 1)), RankGrid(("pp", "dp_replicate"), (2, 2))
    loaded_grid = RankGrid(("dp_shard", "tp"), (2, 2))
    assert [version_for("data", saved, saved_grid, loaded_grid, rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [version_for("data", saved, saved_grid, saved_grid, rank) for rank in range(4)] == [0, 1, 0, 1]
    by_stage = SavedExtra(True, (0, 0, 1, 1))  # not of the data
    assert version_for("ema", by_stage, saved_grid, saved_grid, 2) == 1
    with refused(CheckpointError, 'extra["ema"]', "4 ranks (pp 2 × dp_replicate 2)", "dp_shard 2 × tp 2"):
        version_for("ema", by_stage, saved_grid, loaded_grid, 2)
