"""One rank over NCCL: groups, FSDP, checkpoints and profiles on a GPU. Several ranks would need a GPU each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu import nccl_rank
from tests.runtime import meshes, ranks
from tests.runtime.packages import write

TIMEOUT = 100.0
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(meshes.perceptrons(1), tmp_path_factory.mktemp("package") / "perceptrons"))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"dp_shard": 1}, {}),
        ({"dp_replicate": 1, "dp_shard": 1}, {"strict": True}),
        ({"pp": 1, "dp_shard": 1, "tp": 1}, {"tp_plan": meshes.TP_PLAN}),
        ({"tp": 1}, {"tp_plan": meshes.TP_PLAN, "strict": True}),
    ],
)
def test_meshes_train_alike(folder: str, shape: dict[str, int], options: dict[str, object]) -> None:
    expected, actual = (run(nccl_rank.losses, folder, *case) for case in (({"pp": 1}, {}), (shape, options)))
    assert isinstance(actual, list) and len(actual) == nccl_rank.STEPS, actual
    assert actual == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_has_the_random_numbers_of_the_gpu(folder: str, tmp_path: Path) -> None:
    shape = {"pp": 1, "dp_shard": 1}
    assert run(nccl_rank.saved_and_resumed, folder, shape, str(tmp_path)) == (True, True)


def run(function: Any, *arguments: Any) -> Any:
    """What the rank says."""
    backend = "cpu:gloo,cuda:nccl"
    (answer,) = ranks.run(function, 1, *arguments, timeout=TIMEOUT, backend=backend, method="spawn")
    return answer
