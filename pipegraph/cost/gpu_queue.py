"""Work that a GPU does while the host launches what is timed: none of that then waits for its launch."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Final

import torch

_SIDE: Final = 4096  # of a product of two matrices of float32, which takes a GPU some milliseconds
_SAFETY: Final = 1.5  # the host may take longer than the last time


class GpuQueueFiller:
    """A context for each round of launches. A GPU is given as much work before it as the last round took the host.

    On a CPU, which computes what it is told at once, it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launching = 0.0  # seconds of the host in the last round
        if device.type != "cpu":
            self._matrix = torch.zeros(_SIDE, _SIDE, device=device)
            self._result = torch.empty_like(self._matrix)
            self._product = self._time_product()

    def __enter__(self) -> None:
        if self._device.type != "cpu":
            for _ in range(self.products(self._launching, self._product)):
                torch.mm(self._matrix, self._matrix, out=self._result)
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._launching = time.perf_counter() - self._began

    @staticmethod
    def products(launching: float, product: float) -> int:
        """How many products, of so many seconds each, last for as long as the host launches."""
        return math.ceil(_SAFETY * launching / product)

    def _time_product(self) -> float:
        for _ in range(2):  # the first one loads its kernel
            torch.accelerator.synchronize()
            began = time.perf_counter()
            torch.mm(self._matrix, self._matrix, out=self._result)
            torch.accelerator.synchronize()
        return time.perf_counter() - began
