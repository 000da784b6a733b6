"""Torch's profiler for oneself: a process has one, and to start a second one beside it ends the process by a crash."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipegraph.errors import PipegraphError
from pipegraph.runtime.pipeline import Pipeline

_held = threading.Lock()


@contextmanager
def alone(pipe: Pipeline) -> Iterator[None]:
    """Hold torch's profiler while the body runs. All processes of the pipeline do this together.

    Raises PipegraphError, in all of them, where something else is recording in one of them.
    """
    is_ours = _held.acquire(blocking=False)
    try:
        told = pipe.gather([not is_ours or _torch_records()])
        taken = [rank for rank, (is_taken,) in enumerate(told) if is_taken]
        if taken:
            where = f"rank {taken[0]}" if len(told) > 1 else "this process"
            raise PipegraphError(
                f"{where} is recorded by another profile already, and torch's profiler is there once in a process.\n"
                "Try: end the other one first; pipegraph.profile records what torch.profiler.profile does."
            )
        yield
    finally:
        if is_ours:
            _held.release()


def _torch_records() -> bool:
    """Whether a profiler of somebody else is recording.

    By `torch.autograd._profiler_enabled`, which is private: torch's public profiler says of itself alone what it does.
    """
    return bool(torch.autograd._profiler_enabled())
