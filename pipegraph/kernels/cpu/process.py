"""How a rank uses a CPU: its threads, and the memory that it keeps."""

from __future__ import annotations

import ctypes
import os
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""The numbers of these parameters in glibc's malloc.h."""

_LARGEST: Final = 512 * 2**20
"""Bytes of the tensors that are kept. glibc before 2.38 may keep some eight in place of one (its bug 14581)."""


def threads_per_rank(ranks: int) -> int:
    """``OMP_NUM_THREADS`` if it is set; else this process's cores, shared out equally; at least one."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors up to 512 MiB, as torch does on a GPU.

    By default glibc maps each tensor of more than 32 MiB again and gives it back when it is freed, so that every
    microbatch waits for the system to clear the same pages again (mallopt(3)). If the user has set
    ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_`` or ``GLIBC_TUNABLES``, those hold; other C libraries keep
    their ways.
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, -1)  # never
