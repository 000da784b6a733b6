"""How long work takes, as a ratio: a slow or busy machine slows a fixed loop as much."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def loop_seconds() -> float:
    """Seconds of a core that a fixed loop of Python takes: a tenth of one on an idle machine."""
    started = time.process_time()
    remainder = 0
    for number in range(2_500_000):
        remainder += number * number % 7
    return time.process_time() - started


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What ``work`` returns, and how many times as long as the loop it takes a core."""
    started = time.process_time()
    result = work()
    return result, (time.process_time() - started) / loop_seconds()
