"""A device of torch: its name, memory, random numbers, streams, and the times of its work; the memory of this machine.

A kind of device other than the CPU is asked through `torch.get_device_module`, whose functions have the same names for
each kind. A kind that lacks one of them is added here.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipegraph.errors import ArgumentError
from pipegraph.units import format_bytes


class Device:
    """A device.

    Attributes:
        torch_device: as torch has it.
        is_cpu: whether kernels run in the calling thread, so that nothing has to be waited for.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.torch_device = torch.device(device)
        self.is_cpu = self.torch_device.type == "cpu"

    @property
    def name(self) -> str:
        """The name under which the device is sold."""
        if not self.is_cpu:
            return str(self._module.get_device_name(self.torch_device))
        lines = _lines("/proc/cpuinfo")
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.processor() or platform.machine())

    @property
    def memory_bytes(self) -> int:
        """Its memory; for the CPU that of the machine."""
        if self.is_cpu:
            return memory_of_host()
        return int(self._module.get_device_properties(self.torch_device).total_memory)

    @property
    def free_bytes(self) -> int | None:
        """Its free memory; None if the machine does not report it."""
        if not self.is_cpu:
            return int(self._module.mem_get_info(self.torch_device)[0])
        lines = (line for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:"))
        return next((int(line.split()[1]) * 1024 for line in lines), None)

    @property
    def peak_bytes(self) -> int:
        """The most memory that torch had allocated since `reset_peak`; for the CPU the most that the process had."""
        if not self.is_cpu:
            return int(self._module.max_memory_allocated(self.torch_device))
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak(self) -> None:
        """Count `peak_bytes` from here on. The CPU cannot."""
        if not self.is_cpu:
            self._module.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        """Wait until all work that was launched is done."""
        if not self.is_cpu:
            self._module.synchronize(self.torch_device)

    # ---- streams and times -------------------------------------------------------------------------------------------

    def stream(self) -> Any:
        """Return a new stream; None for the CPU, which has none."""
        return None if self.is_cpu else self._module.Stream(self.torch_device)

    def current_stream(self) -> Any:
        """Return the current stream of the calling thread; None for the CPU."""
        return None if self.is_cpu else self._module.current_stream(self.torch_device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work is launched on a stream that `stream` has returned."""
        return nullcontext() if stream is None else self._module.stream(stream)

    def record_event(self) -> Any:
        """Return an event of the current stream, after all work launched so far; None for the CPU."""
        return None if self.is_cpu else self.current_stream().record_event()

    def wait_event(self, event: Any) -> None:
        """Let the current stream wait for an event. Does nothing for None."""
        if event is not None:
            self.current_stream().wait_event(event)

    def now(self, stream: Any = None) -> Any:
        """Return the time in seconds of `time.perf_counter`; other than for the CPU an event, without a wait for it.

        Args:
            stream: of the event, by default the current stream.
        """
        if self.is_cpu:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record() if stream is None else event.record(stream)
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two times of `now`, which `has_passed`."""
        seconds: float = end - begin if self.is_cpu else begin.elapsed_time(end) / 1000
        return seconds

    def has_passed(self, moment: Any) -> bool:
        """Whether the device has finished all work before a time of `now`."""
        return self.is_cpu or bool(moment.query())

    # ---- random numbers ----------------------------------------------------------------------------------------------

    @contextmanager
    def fork_rng(self) -> Iterator[None]:
        """A context after which the random generators of the CPU and of this device are as before."""
        devices = [] if self.is_cpu else [self.torch_device]
        kind = "cuda" if self.is_cpu else self.torch_device.type
        with torch.random.fork_rng(devices=devices, device_type=kind):
            yield

    def rng_state(self) -> Tensor | None:
        """The state [uint8] of its random generator; None for the CPU, whose state `torch.get_rng_state` has."""
        return None if self.is_cpu else self._module.get_rng_state(self.torch_device)

    def set_rng_state(self, state: Tensor) -> None:
        """Set the state that `rng_state` returned."""
        if not self.is_cpu:
            self._module.set_rng_state(state, self.torch_device)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.torch_device)


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def memory_of_host() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_room(required_bytes: int, subject: str) -> None:
    """Raise ArgumentError if ``subject``, an input of ``required_bytes``, is larger than the memory of this machine."""
    present = memory_of_host()
    if required_bytes > present:
        raise ArgumentError(
            f"{subject} takes {format_bytes(required_bytes)}, and this machine has {format_bytes(present)}.",
            "fewer rows or tokens.",
        )
