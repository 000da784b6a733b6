"""A value crosses to each rank once, whichever stages there take it, and one gradient of it returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegraph.package import Package
from pipegraph.package.routes import gradient_routes, routes
from pipegraph.schedule import build, lower
from tests.runtime import ranks, route_ranks
from tests.runtime.packages import write
from tests.runtime.parity import assert_parity
from tests.runtime.sketches import skips

V, LOOP = (0, 1, 1, 0), (0, 1, 0, 1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(route_ranks.dense(4), tmp_path_factory.mktemp("dense") / "package")


def test_the_first_stage_on_a_rank_hands_a_value_on(dense: Path) -> None:
    manifest = Package.open(dense).manifest
    assert routes(manifest, V) == {
        (0, 1): ("h0",),
        (0, 3): ("h0",),  # on its own rank
        (1, 2): ("h0", "h1"),
        (1, 3): ("h1",),
        (2, 3): ("h2",),
    }
    assert routes(manifest, LOOP) == {
        (0, 1): ("h0",),
        (0, 2): ("h0",),
        (1, 2): ("h1",),
        (1, 3): ("h0", "h1"),
        (2, 3): ("h2",),
    }
    assert set(routes(manifest, (0, 1, 2, 3))) == set(manifest.edges())


def test_a_stage_hands_nothing_on_to_one_that_may_run_first(tmp_path: Path) -> None:
    manifest = Package.open(write(route_ranks.branches(), tmp_path / "package")).manifest
    assert routes(manifest, (0, 1, 1, 0)) == {(0, 1): ("a",), (0, 2): ("a",), (1, 3): ("b",), (2, 3): ("c",)}


def test_gradients_return_over_edges_that_carry_one(tmp_path: Path) -> None:
    manifest = Package.open(write(skips(), tmp_path / "package")).manifest
    edges = routes(manifest, V)
    assert edges[0, 2] == ("cosine",)
    assert gradient_routes(manifest, edges) == tuple(edge for edge in edges if edge != (0, 2))


def test_a_dense_model_sends_less(dense: Path) -> None:
    """With one message to each stage, rank 0 sends h0 twice, and rank 1 its gradient."""
    manifest, schedule = Package.open(dense).manifest, build("zb-v", 2, 4)
    of_values = routes(manifest, schedule.placement)
    counts = []
    for edges, gradients in (
        (manifest.edges(), manifest.gradient_edges()),
        (tuple(of_values), gradient_routes(manifest, of_values)),
    ):
        row = lower(schedule, edges, gradients).actions
        counts.append([sum(action.sends for action in actions) // 4 for actions in row])
    assert counts == [[4, 4], [3, 3]]


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_one_process_is_the_unsplit_model(dense: Path, schedule: str, kernels: str) -> None:
    assert_parity(dense, schedule, steps=3, accumulate=2, kernels=kernels)


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-1f1b"])
def test_processes_are_the_unsplit_model(dense: Path, schedule: str) -> None:
    assert ranks.run(route_ranks.parity, 2, str(dense), schedule) == [3, 3]


def test_branches_are_the_unsplit_model(tmp_path: Path) -> None:
    package = write(route_ranks.branches(), tmp_path / "package")
    assert_parity(package, "zb-v", steps=2)
    ranks.run(route_ranks.parity, 2, str(package), "zb-v")
