"""What ranks along dp_shard send for parameters of any dtype, to stages of any kernels, in any mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime import ranks, sharded_parameters
from tests.runtime.packages import write

STAGES = 2


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write(sharded_parameters.several_dtypes(), tmp_path / "package"))


@pytest.mark.parametrize(
    ("options", "gathers"),
    [
        ({"kernels": "eager", "strict": True}, STAGES),
        ({"kernels": "autograd", "resident": 1, "reduce_dtype": torch.float32}, STAGES + 1),
    ],
)
def test_every_dtype_is_gathered_and_reduced_in_its_own(options: dict[str, Any], gathers: int, folder: str) -> None:
    """Also where what autograd has saved is freed before the backward, and gathered again."""
    messages = len(sharded_parameters.DTYPES)
    for counts in ranks.run(sharded_parameters.train_beside_one_process, 2, folder, options):
        assert counts == (gathers * messages, STAGES * messages), counts


def test_an_evaluation_in_inference_mode(folder: str) -> None:
    for losses in ranks.run(sharded_parameters.evaluate_in_inference_mode, 2, folder):
        assert isinstance(losses, list), losses
        loss_before, trained, loss_after = losses
        assert loss_before == trained == loss_after
