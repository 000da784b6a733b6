"""The machine: its name, its idlest cores, and how much of them other programs take."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def machine_name() -> str:
    """Return the processor's model and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{model}, {os.cpu_count()} cores"


def idlest_cores(count: int) -> tuple[int, ...]:
    """Return the idlest cores of the last second, of those that this process may use."""
    ticks_before = _ticks()
    time.sleep(1)
    idle = {core: ticks[1] - ticks_before[core][1] for core, ticks in _ticks().items()}
    return tuple(sorted(os.sched_getaffinity(0), key=lambda core: -idle[core])[:count])


def pin_threads(cores: Iterable[int]) -> None:
    """Keep every thread of this process on these cores."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


def use_default_malloc() -> None:
    """Undo `keep_freed_memory`: the thresholds to which glibc adapts once tensors of 32 MiB were freed (mallopt(3))."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD
    mallopt(-1, 64 * 2**20)  # M_TRIM_THRESHOLD


class CoreTime:
    """Seconds of processor time that all programs took on some cores since it was made."""

    def __init__(self, cores: Iterable[int]) -> None:
        self._cores = tuple(cores)
        self._busy_before, self._began = self._busy(), time.perf_counter()

    def share_of_others(self, seconds: float) -> float:
        """Return the part of these cores that others took, if this benchmark's processes took `seconds` seconds."""
        passed = (time.perf_counter() - self._began) * len(self._cores)
        return max(0.0, self._busy() - self._busy_before - seconds) / passed

    def _busy(self) -> float:
        ticks = _ticks()
        return sum(ticks[core][0] for core in self._cores) / os.sysconf("SC_CLK_TCK")


def _ticks() -> dict[int, tuple[int, int]]:
    """Return core → (ticks in which it worked or was taken away, idle ticks)."""
    ticks = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *figures = line.split()
        if name[:3] == "cpu" and name != "cpu":
            user, nice, system, idle, wait, irq, softirq, steal = map(int, figures[:8])
            ticks[int(name[3:])] = user + nice + system + irq + softirq + steal, idle + wait
    return ticks
