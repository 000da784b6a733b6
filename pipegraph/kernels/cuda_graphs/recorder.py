"""What records the kernels that a call launches, and launches all of them at once later on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")

Replay = Callable[[], None]
"""Computes again what was recorded, from the same memory into the same memory"""


class Recorder(Protocol):
    """Records calls that always run one after the other, in the order in which they were recorded.

    Attributes:
        device: what is computed elsewhere is not recorded.
    """

    device: torch.device

    def record(self, call: Callable[[], Result]) -> tuple[Result, Replay]:
        """Return what the call returns, and what computes that. Nothing is computed before.

        Raises:
            Exception: whatever the call raises; RuntimeError for one that cannot be recorded.
        """
        ...


MakeRecorder = Callable[[], Recorder]
"""makes what records the kernels of one microbatch at a time"""


class CudaGraphRecorder:
    """Records CUDA graphs, which share the memory that they use in between."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _recording_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Result]) -> tuple[Result, Replay]:
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would first wait for all that the GPU has to do: for a receive, too, of what another rank
        # sends only once it has got what this one is about to compute. Threads of NCCL may continue.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = call()
            except BaseException:
                with suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return result, graph.replay


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all graphs are recorded: memory that is free again is found by its stream."""
    return torch.cuda.Stream(device)
