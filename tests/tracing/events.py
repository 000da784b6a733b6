"""Events of a trace as torch writes them, and the arguments of an action."""

from __future__ import annotations

from typing import Any

from pipegraph.schedule import Action

Event = dict[str, Any]


def complete(category: str | None, name: str, start: float, duration: float, thread: int = 1, **args: Any) -> Event:
    """A complete event; `External_id` is the argument "External id"."""
    named = {key.replace("_", " "): value for key, value in args.items()}
    event = {"ph": "X", "name": name, "pid": 10, "tid": thread, "ts": start, "dur": duration, "args": named}
    return event if category is None else {**event, "cat": category}


def arguments(action: Action) -> dict[str, Any]:
    return {"stage": action.stage, "kind": action.kind.value, "microbatch": action.microbatch, "rank": action.stage}


def gpu_steps() -> list[Event]:
    """Two steps on a GPU: `F stage 1 microbatch 0` launches a kernel by an operator, and another one by itself."""
    events: list[Event] = []
    kernel = {"device": 0, "stream": 7, "blocks_per_SM": 1.0, "grid": [1, 1, 1], "block": [1, 1, 1]}
    for step in (1, 2):
        start = 1000.0 * step
        at_step, at_action, at_operator = ({"External_id": 10 * step + number} for number in range(3))
        first, second = {"correlation": 10 * step + 3}, {"correlation": 10 * step + 4}
        events += [
            complete("user_annotation", f"ProfilerStep#{step}", start, 900.0, **at_step),
            complete("user_annotation", "F stage 1 microbatch 0", start + 10, 100.0, **at_action),
            complete("cpu_op", "aten::mm", start + 20, 20.0, **at_operator),
            complete("cuda_runtime", "cudaLaunchKernel", start + 25, 5.0, **at_operator, **first),
            complete("cuda_driver", "cuLaunchKernel", start + 60, 5.0, **at_action, **second),
            complete("kernel", "gemm", start + 200, 50.0, 7, **at_operator, **first, **kernel),
            complete("kernel", "fused", start + 251, 30.0, 7, **at_action, **second, **kernel),
            complete("gpu_user_annotation", "F stage 1 microbatch 0", start + 200, 81.0, 7, **at_action),
            complete("gpu_user_annotation", f"ProfilerStep#{step}", start + 200, 81.0, 7, **at_step),
        ]
    return events
