"""What every test gets. The environment is set here, before anything imports torch.

``--renew-golden`` writes again the files that some tests compare with.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from tests.left_processes import left_processes, mark_processes

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("pipegraph", deadline=None)
hypothesis.settings.load_profile("pipegraph")

# Tests run side by side and start processes of their own; one thread each is faster than all of them fighting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Every captured graph is checked after every pass.
os.environ.setdefault("PIPEGRAPH_VERIFY", "1")

# pytest-xdist gives its workers a terminal of 80 columns; what a test reads is as wide as in a file.
os.environ.pop("COLUMNS", None)

# A shell starts jobs in the background with SIGINT ignored, which every process that they start inherits.
signal.signal(signal.SIGINT, signal.default_int_handler)


mark_processes()


@pytest.fixture(autouse=True, scope="session")
def _no_process_is_left() -> Iterator[None]:
    yield
    assert left_processes() == []


def pytest_collection_finish() -> None:
    """Python's garbage collector need not look at what was imported, and looks less often: graphs are large."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write the golden files again, then compare")
