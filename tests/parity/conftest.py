"""The workshop, shared by the workers of pytest-xdist."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.parity import workshop


@pytest.fixture(scope="session")
def shared_workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workshop.Workshop]:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # a worker's own folder lies in its session's
    with workshop.workshop(shared / "parity") as opened:
        yield opened
