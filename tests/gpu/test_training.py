"""Training on a GPU, all stages in one process: loss and gradients are those of the unsplit model there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipegraph.schedule import names
from pipegraph.schedule.recipes import trains
from tests.gpu.gpu_models import CUTS, difference, of_model, of_pipeline, split

TOLERANCE = 1e-5


@pytest.mark.parametrize("file", CUTS)
def test_models_in_float32(file: str, tmp_path: Path) -> None:
    case = split(tmp_path, file)
    # A bias before a batch norm has a gradient of rounding alone.
    tolerance = 20 * TOLERANCE if "batch_norm" in file else TOLERANCE
    assert difference(of_pipeline(case, "zb-v", "eager"), of_model(case)) <= tolerance


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", ["tests/models/rotary.py", "examples/unet.py", "tests/models/llama.py"])
def test_kernels_that_inductor_compiles(file: str, tmp_path: Path) -> None:
    case = split(tmp_path, file)
    for schedule in ("zb-v", "1f1b"):
        assert difference(of_pipeline(case, schedule, "inductor"), of_model(case)) <= 5 * TOLERANCE


@pytest.mark.parametrize("schedule", [name for name in names() if trains(name)])
def test_schedules(schedule: str, tmp_path: Path) -> None:
    case = split(tmp_path, "tests/models/rotary.py")
    assert difference(of_pipeline(case, schedule, "eager"), of_model(case)) <= TOLERANCE


@pytest.mark.parametrize("recompute", ["none", "block", "min-cut", "offload"])
def test_recompute(recompute: str, tmp_path: Path) -> None:
    case = split(tmp_path, "tests/models/llama.py")
    assert difference(of_pipeline(case, "zb-v", "eager", recompute=recompute), of_model(case)) <= TOLERANCE


@pytest.mark.parametrize("kernels", ["eager", pytest.param("inductor", marks=pytest.mark.timeout(600))])
def test_bfloat16(kernels: str, tmp_path: Path) -> None:
    """Roundings of bfloat16 have 8 bits, and kernels round in other places."""
    case = split(tmp_path, "tests/models/llama.py", torch.bfloat16)
    assert difference(of_pipeline(case, "zb-v", kernels), of_model(case)) <= 0.05


@pytest.mark.parametrize("kernels", ["eager", pytest.param("inductor", marks=pytest.mark.timeout(600))])
def test_autocast(kernels: str, tmp_path: Path) -> None:
    case = split(tmp_path, "tests/models/rotary.py")
    step = of_pipeline(case, "zb-v", kernels, torch.bfloat16)
    assert difference(step, of_model(case, torch.bfloat16)) <= 0.05
    assert difference(step, of_model(case)) > 10 * TOLERANCE, "products are rounded"
