"""Measured times: the median of several runs, and how far the others are from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

_SHORTEST = 50e-6  # seconds of a sample: of shorter runs several make one, or the clock would be measured
_FEWEST, _MOST = 5, 30  # samples


@dataclass
class Stopwatch:
    """Times runs on a device, each for about ``budget`` seconds. ``spreads`` has the noise of each measurement.

    Before each run ``footprint`` bytes of other data go through the caches, as in a step, where a kernel runs once
    between others; with none, a run finds in the caches what it left there.
    """

    device: torch.device
    budget: float = 0.05
    footprint: int = 0
    spreads: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The time of a core leaves out what other processes take of it, and knows nothing of other threads or a GPU.
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if alone else time.perf_counter
        self._other = torch.ones(self.footprint // 4, device=self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of one run."""
        run()
        once = max(self._sample(run, 1), 1e-9)
        together = 1 if self.footprint else max(1, round(_SHORTEST / once))
        count = min(max(round(self.budget / (once * together)), _FEWEST), _MOST)
        samples = [self._sample(run, together) / together for _ in range(count)]
        low, median, high = statistics.quantiles(samples, n=4)
        self.spreads.append((high - low) / median)
        return median

    @property
    def noise(self) -> float:
        """The usual distance between the quartiles, as part of the median."""
        return statistics.median(self.spreads) if self.spreads else 0.0

    def _sample(self, run: Callable[[], object], count: int) -> float:
        if self.footprint:
            self._other.sum()
        self._wait()
        started = self._clock()
        for _ in range(count):
            run()
        self._wait()
        return self._clock() - started

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
