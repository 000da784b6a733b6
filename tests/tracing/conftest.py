"""A chain of two stages, and a training loop on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.packages import write
from tests.runtime.sketches import chain
from tests.tracing.loops import WIDTH, Loop, make_pipeline


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(chain(2, width=WIDTH), tmp_path_factory.mktemp("package") / "chain")


@pytest.fixture
def loop(package: Path) -> Loop:
    return Loop(make_pipeline(package))
