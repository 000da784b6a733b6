"""What pipegraph asks of a device, on the CPU and on one whose module of torch is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipegraph.device import Device, memory_of_host


def test_the_cpu() -> None:
    device = Device("cpu")
    assert device.is_cpu and device.name and device.memory_bytes == memory_of_host()
    assert device.free_bytes is None or 0 < device.free_bytes < device.memory_bytes
    assert 0 < device.peak_bytes < device.memory_bytes
    device.synchronize()
    device.reset_peak()
    assert device.rng_state() is None
    before = torch.get_rng_state()
    with device.fork_rng():
        torch.manual_seed(7)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_device_is_asked_through_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def called(name: str, result: Any) -> Any:
        return lambda *arguments: (calls.append((name, *arguments)), result)[1]

    state = torch.zeros(4, dtype=torch.uint8)
    module = SimpleNamespace(
        get_device_name=called("name", "a GPU"),
        get_device_properties=called("properties", SimpleNamespace(total_memory=80)),
        mem_get_info=called("free", (30, 80)),
        max_memory_allocated=called("peak", 50),
        reset_peak_memory_stats=called("reset", None),
        synchronize=called("synchronize", None),
        get_rng_state=called("get", state),
        set_rng_state=called("set", None),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device, gpu = Device("cuda:1"), torch.device("cuda:1")
    assert (device.name, device.memory_bytes, device.free_bytes, device.peak_bytes) == ("a GPU", 80, 30, 50)
    device.reset_peak()
    device.synchronize()
    assert device.rng_state() is state
    device.set_rng_state(state)
    names = ["name", "properties", "free", "peak", "reset", "synchronize", "get", "set"]
    assert [call[0] for call in calls] == names
    assert all(gpu in call for call in calls)
