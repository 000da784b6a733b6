"""Seconds of calls, which take turns: by events of a GPU's stream, on a CPU by the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_WARM_UP = 3

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """What a call took.

    Attributes:
        seconds: the median over rounds.
        ratio: to the first call of its round: the median, between its quartiles.
    """

    seconds: float
    ratio: tuple[float, float, float]


def seconds_of(call: Call, device: torch.device) -> float:
    """Seconds of a call: on a GPU from when the stream comes to its first kernel to the end of the last one."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def in_turns(
    calls: Mapping[str, Call], device: torch.device, rounds: int, setups: Mapping[str, Call] | None = None
) -> dict[str, Timing]:
    """Time calls in turns, each round beginning with another one.

    Args:
        setups: done before a call, untimed.
    """
    order, durations = list(calls), {name: list[float]() for name in calls}
    for number in range(_WARM_UP + rounds):
        start = number % len(order)
        for name in order[start:] + order[:start]:
            if setups is not None and name in setups:
                setups[name]()
            seconds = seconds_of(calls[name], device)
            if number >= _WARM_UP:
                durations[name].append(seconds)
    first = durations[order[0]]
    timings = {}
    for name, seconds in durations.items():
        ratios = [duration / reference for duration, reference in zip(seconds, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        timings[name] = Timing(statistics.median(seconds), (low, middle, high))
    return timings
