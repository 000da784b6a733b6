"""Where the ranks of a mesh are, and which patterns name which modules."""

from __future__ import annotations

import pytest

from pipegraph.errors import ArgumentError
from pipegraph.runtime.processes.launch import pipeline_ranks
from pipegraph.runtime.processes.rank_grid import DATA, DIMENSIONS, RankGrid, grid_of, single
from pipegraph.runtime.tensor_parallel import matches
from tests.messages import refused

GRID = RankGrid(("pp", "dp_shard", "tp"), (2, 3, 2))


def test_places_and_lines() -> None:
    assert GRID.size == 12
    assert GRID.coordinates(9) == {"pp": 1, "dp_shard": 1, "tp": 1}
    assert GRID.line(9, "pp") == (3, 9)
    assert GRID.line(9, "tp") == (8, 9)
    assert GRID.line(9, *DATA) == (7, 9, 11)
    assert GRID.line(9, "dp_replicate") == (9,)
    assert GRID.line(9, *DIMENSIONS) == tuple(range(12))
    assert (GRID.length("pp"), GRID.length(*DATA), GRID.length("dp_replicate")) == (2, 3, 1)
    assert [GRID.first(place) for place in range(2)] == [0, 6]


def test_names_of_ranks() -> None:
    assert GRID.text(9) == "rank 9 (pp 1, dp_shard 1, tp 1)"
    assert GRID.text(12) == "rank 12"
    assert single(4).text(2) == "rank 2"


def test_the_order_of_dimensions() -> None:
    grid = grid_of(3, {"tp": 2}, ("tp", "pp", "dp_replicate", "dp_shard"))
    assert grid.shape == (2, 3, 1, 1)
    assert grid.line(1, "pp") == (0, 1, 2)
    with refused(ArgumentError, 'mesh_order="pp,tp"', advice="mesh_order="):
        grid_of(3, {}, ("pp", "tp"))
    with refused(ArgumentError, '"cp"', advice="dp_replicate"):
        grid_of(3, {}, ("pp", "cp", "dp_replicate", "dp_shard"))


def test_processes_that_make_no_whole_pipelines_are_refused() -> None:
    assert pipeline_ranks(8, {"dp_shard": 2, "tp": 2}, lambda: 4) == 2
    assert pipeline_ranks(None, {"dp_shard": 2}, lambda: 4) is None
    with refused(ArgumentError, "7 processes", "pp × dp_shard 2", advice="--nproc 8"):
        pipeline_ranks(7, {"dp_shard": 2, "tp": 1}, lambda: 4)


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("layers.*.up", "layers.3.up", True),
        ("layers.*.up", "layers.3.mlp.up", False),
        ("layers.*.up", "layers.3", False),
        ("layer*", "layers", True),
        ("head", "head", True),
        ("Head", "head", False),
    ],
)
def test_patterns(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) == fits
