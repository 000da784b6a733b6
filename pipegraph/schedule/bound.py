"""What no schedule can beat."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipegraph.errors import ScheduleError
from pipegraph.schedule.times import Times


def lower_bound(times: Times, placement: Sequence[int], microbatches: int, memory_limit: float | None = None) -> float:
    """Seconds that every schedule of a chain of stages takes from 0 to its end, however its actions are ordered.

    The largest, over the ranks r and all at once, of four bounds. Nothing runs on r before the first microbatch has
    come through the stages before r's first one, which takes head(r); T is what r computes for one microbatch.

    - work: head(r) + m·T(r);
    - drain: head(r) + m·Σ(f + b of r) + tail(r). The last I on r's first stage has all F and I of r before it, and
      behind it the I of every earlier stage and the W of stage 0;
    - one microbatch: its way through all stages and back, and the W of stage 0 (the drain bound of one microbatch);
    - memory: stage s holds an activation for R(s) or more, from its F through all later stages and back to its W. On r
      at most K = min(memory limit, all) are held at once, and they start f apart and end w apart (least of r's
      stages). So K·(M − head(r)) ≥ m·ΣR(s) + K(K−1)/2·(f + w).

    Raises ScheduleError where times and placement are of different numbers of stages.
    """
    if len(placement) != times.stages:
        raise ScheduleError(f"The placement is of {len(placement)} stages, and the times are for {times.stages}.")
    stages = range(len(placement))
    hops = [
        0.0 if a == b else times.hop_of((s, s + 1)) + times.transfer_of((s, s + 1))
        for s, (a, b) in enumerate(pairwise(placement))
    ]
    f, b, w = times.forward, times.input_grad, times.weight_grad
    head = [0.0]
    tail = [w[0]]
    for stage in stages[1:]:
        head.append(head[-1] + f[stage - 1] + hops[stage - 1])
        tail.append(tail[-1] + b[stage - 1] + hops[stage - 1])
    end = len(placement) - 1
    bounds = [head[end] + f[end] + b[end] + tail[end]]
    for rank in set(placement):
        held = [stage for stage in stages if placement[stage] == rank]
        first = held[0]
        forward_backward = microbatches * sum(f[stage] + b[stage] for stage in held)
        bounds.append(head[first] + forward_backward + microbatches * sum(w[stage] for stage in held))
        bounds.append(head[first] + forward_backward + tail[first])
        if memory_limit is not None:
            most = int(min(memory_limit, microbatches * len(held)))
            lives = [head[end] - head[s] + f[end] + b[end] + tail[end] - tail[s] + w[s] for s in held]
            ramps = most * (most - 1) / 2 * (min(f[s] for s in held) + min(w[s] for s in held))
            bounds.append(head[first] + (microbatches * sum(lives) + ramps) / max(most, 1))
    return max(bounds)
