"""A run that continues elsewhere has the losses that it would have had, to the last digit."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.testing import assert_close

from tests.runtime import checkpoint_models as models
from tests.runtime import checkpoint_ranks, ranks
from tests.runtime.packages import write

SEED = 3
BATCHES = 8, 2


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for stages in (2, 4):
        write(models.perceptrons(stages, dropout=0.1), folder / str(stages))
    return folder


@pytest.fixture(scope="module")
def saved(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[float | None]]]:
    """By the rows of a batch, the folder of a run that was saved at step 5, and its losses after that."""
    runs = {}
    for batch in BATCHES:
        run = models.start(packages / "2", batch=batch, seed=SEED)
        run.train(0, 5)
        folder = run.save(tmp_path_factory.mktemp("run"), 5)
        runs[batch] = folder, run.train(5, 10)
    return runs


@pytest.mark.parametrize(
    ("stages", "schedule", "shape", "batch"),
    [
        pytest.param("4", "zb-v", {"pp": 2}, 8, marks=pytest.mark.slow),
        pytest.param("4", "zb-h1", {"pp": 4}, 8, marks=pytest.mark.slow),
        # One microbatch for each rank: with more, each rank first adds up the gradients of its microbatches.
        ("2", "1f1b", {"pp": 2, "dp_shard": 2}, 2),
    ],
)
def test_it_goes_on_in_processes(
    packages: Path,
    saved: dict[int, tuple[Path, list[float | None]]],
    stages: str,
    schedule: str,
    shape: dict[str, int],
    batch: int,
) -> None:
    folder, losses = saved[batch]
    count = shape["pp"] * shape.get("dp_shard", 1)
    runs = ranks.run(checkpoint_ranks.resume, count, str(packages / stages), schedule, shape, str(folder), batch, SEED)
    assert runs == [losses] * count


@pytest.mark.parametrize(
    ("stages", "schedule"), [("4", "zb-v"), pytest.param("4", "zb-h1", marks=pytest.mark.slow), ("2", "gpipe")]
)
def test_it_goes_on_in_one_process(
    packages: Path, saved: dict[int, tuple[Path, list[float | None]]], stages: str, schedule: str
) -> None:
    for batch, (folder, losses) in saved.items():
        run = models.start(packages / stages, schedule, batch=batch, seed=SEED)
        run.load(folder)
        assert run.train(5, 10) == losses


@pytest.mark.slow
def test_data_parallel_ranks_add_up_in_another_order(
    packages: Path, saved: dict[int, tuple[Path, list[float | None]]]
) -> None:
    """With two microbatches each, gradients differ in their last digits: (0 + 1) + (2 + 3) is not ((0 + 1) + 2) + 3."""
    folder, losses = saved[8]
    arguments = (str(packages / "2"), "1f1b", {"pp": 2, "dp_shard": 2}, str(folder), 8, SEED)
    first, *others = ranks.run(checkpoint_ranks.resume, 4, *arguments)
    assert others == [first] * 3
    assert first[0] == losses[0]  # of which no gradient is a part
    assert_close(first, losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "shape",
    [{"pp": 2, "dp_shard": 2}, pytest.param({"pp": 2, "dp_replicate": 2}, marks=pytest.mark.slow)],
    ids=["shard", "replicate"],
)
def test_nothing_else_differs_between_data_parallel_ranks_and_one(shape: dict[str, int], tmp_path: Path) -> None:
    """One process that adds up the gradients of each half first has the same losses, to the last digit."""
    package = write(models.perceptrons(2, tied=False), tmp_path / "package")
    run = models.start(package)
    run.train(0, 5)
    run.save(tmp_path / "run", 5)
    losses = run.train_in_halves(5, 10)
    runs = ranks.run(checkpoint_ranks.resume, 4, str(package), "1f1b", shape, str(tmp_path / "run"), 8, None)
    assert runs == [losses] * 4
