"""How many threads a rank computes with on a CPU."""

from __future__ import annotations

import os


def threads_per_rank(ranks: int) -> int:
    """``OMP_NUM_THREADS`` if it is set; else this process's cores, shared out equally; at least one."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)
