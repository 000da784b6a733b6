"""A rank keeps the memory of tensors that it has freed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PAGES_TOUCHED = """
import resource
import torch
from pipegraph.kernels.cpu.process import keep_freed_memory

def touch():
    torch.empty(40 * 2**20, dtype=torch.uint8).fill_(1)

keep_freed_memory()
for _ in range(20):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_touched(**environment: str) -> int:
    """How many pages the system gives to a process that makes a tensor of 40 MiB again and again."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PAGES_TOUCHED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**env, **environment}, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep their ways")
@pytest.mark.slow  # a process for each setting
def test_freed_memory_is_kept_unless_the_user_decides() -> None:
    default_pages, mapped_anew = pages_touched(), pages_touched(MALLOC_MMAP_THRESHOLD_="33554432")
    assert default_pages < 50 < mapped_anew  # at least 20 pages for each tensor, if they are huge ones
