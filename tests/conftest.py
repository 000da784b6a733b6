"""What every test gets. The environment is set here, before anything imports torch.

``--renew-golden`` writes anew the files that some tests compare with.
"""

from __future__ import annotations

import os

import pytest  # noqa: E402 - after what it and torch read

# Tests run side by side and start processes of their own; one thread each is faster than all of them fighting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402 - after what it and torch read


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles says so: it takes seconds. The runtime is tested with kernels that call the stage each time."""
    from pipegraph import Pipeline

    defaults = tuple("autograd" if value == "inductor" else value for value in Pipeline.__init__.__defaults__ or ())
    monkeypatch.setattr(Pipeline.__init__, "__defaults__", defaults)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write the golden files anew, then compare")
