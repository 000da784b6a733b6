"""Other ranks at work while something is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipegraph.cost.busy_ranks import busy_ranks


def children() -> list[int]:
    """The processes that this one has started."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into Linux's /proc")


def test_others_compute_meanwhile_and_are_gone_afterwards() -> None:
    children_before = children()
    with busy_ranks(1, 1):
        (child,) = set(children()) - set(children_before)
        begun = processor_seconds(child)
        deadline = time.monotonic() + 30
        while processor_seconds(child) < begun + 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert children() == children_before


def test_an_error_leaves_none_behind() -> None:
    children_before = children()
    with pytest.raises(KeyError), busy_ranks(1, 1):
        raise KeyError
    assert children() == children_before


def test_none_outlives_the_process_that_started_it() -> None:
    program = (
        "import os\nfrom pathlib import Path\nfrom pipegraph.cost.busy_ranks import busy_ranks\n"
        "held = busy_ranks(1, 1)\nheld.__enter__()\n"
        "print(Path(f'/proc/self/task/{os.getpid()}/children').read_text(), flush=True)\nos._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    (child,) = map(int, done.stdout.split())
    deadline = time.monotonic() + 30
    while (
        Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
