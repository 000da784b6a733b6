"""Tests that need a GPU. Without one they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))
            # What Inductor says where float32 does not round to TF32.
            item.add_marker(pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"))


@pytest.fixture(autouse=True)
def _whole_float32() -> Iterator[None]:
    """Products and convolutions in float32 do not round to TF32, so that cuts and kernels compare."""
    tf32_modes = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32_modes
