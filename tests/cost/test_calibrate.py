"""Measuring a machine. What it attains is its own affair; here, that figures are what they are said to be."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pipegraph.cost import calibrate, machine_links, machine_rates
from pipegraph.cost.calibrate import measure_host_link
from pipegraph.cost.hardware import Hardware, Link, Links, MeasuredLinks, SizeTable
from pipegraph.cost.machine_links import LinkRates
from pipegraph.cost.machine_rates import Stopwatch
from pipegraph.errors import RuntimeFault
from tests.messages import refused

CPU = torch.device("cpu")
QUICK = Stopwatch(CPU, budget=0.001)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small sizes, and functions uncompiled."""
    usual = machine_rates.sizes_on("cpu")
    few = replace(
        usual,
        **{name: dict.fromkeys(getattr(usual, name), (16, 32)) for name in ("matrices", "batched", "attention")},
        convolution={"m": (128,), "n": (4, 8), "k": (27,)},
        streamed=(12_288, 122_880),
    )
    monkeypatch.setattr(machine_rates, "sizes_on", lambda device: few)
    monkeypatch.setattr(machine_rates, "_NEW", (2**20, 2**25))
    monkeypatch.setattr(calibrate, "_FOOTPRINTS", {"cpu": (0, 2**22)})
    monkeypatch.setattr(machine_rates, "compiler_is_missing", lambda: "none in tests")


def test_a_median_of_runs_and_how_far_they_are_apart() -> None:
    watch = Stopwatch(CPU, budget=0.05)
    times = itertools.cycle([0.002, 0.004])
    seconds = watch.seconds(lambda: _spin(next(times)))
    assert 0.0019 < seconds < 0.006
    assert watch.noise > 0.1


def _spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_rates_over_sizes(quick: None) -> None:
    rates = machine_rates.measure_compute_rates(QUICK, torch.float32)
    assert set(rates) == set(Hardware.load("cpu").attained_flops)
    assert list(rates["matmul"].axes) == ["m", "n", "k"]
    large, small = (2 * size**3 / rates["matmul"].at(m=size, n=size, k=size) for size in (32, 16))
    assert 0 < small < large * 8 < 1e-2


def test_a_loop_is_timed_as_it_is_compiled() -> None:
    graph = machine_rates.trace_aten(lambda x: torch.nn.functional.gelu(x), [torch.ones(4, 4)]).graph
    assert torch.ops.aten.erf.default in {node.target for node in graph.nodes}


def test_functions_have_rates(quick: None) -> None:
    rates = machine_rates.measure_element_rates(Stopwatch(CPU, budget=0.01))
    assert rates["pow"] < 1e10  # whatever the machine, a power takes longer than a product
    assert set(rates) <= {*Hardware.load("cpu").element_rates, *machine_rates._cases(CPU)}


@pytest.mark.slow
def test_links_between_processes() -> None:
    rates = machine_links.measure_links(3, "cpu")
    links = rates.links
    assert links.name == "gloo"
    for rank, peer in ((0, 1), (1, 0)):
        assert 0 <= (links.latency[rank][peer] or 0.0) < 1
        assert (links.bandwidth[rank][peer] or 0.0) > 1e6
    assert set(rates.collectives) == {"gather", "reduce", "all_reduce", "all_gather"}
    for table in rates.collectives.values():
        assert table.axes == {"ranks": (2.0, 3.0), "bytes": tuple(map(float, machine_links._SIZES))}
        assert table.at(ranks=2, bytes=2**24) > 10 * table.at(ranks=2, bytes=2**10)  # latency counts for less
    assert multiprocessing.active_children() == []


def test_links_that_take_too_long_leave_no_process() -> None:
    with refused(RuntimeFault, "2 ranks", "0.01 s", advice="--ranks"):
        machine_links.measure_links(2, "cpu", timeout=0.01)
    assert multiprocessing.active_children() == []


def test_latency_and_bandwidth_are_those_that_explain_the_times() -> None:
    sizes = np.array(machine_links._SIZES)
    assert machine_links.fit((2 * 5e-5 + sizes / 1e9).tolist()) == pytest.approx((5e-5, 1e9))
    latency, bandwidth = machine_links.fit([1e-3] * len(sizes))  # a link faster than the clock
    assert latency == pytest.approx(5e-4)
    assert bandwidth > 1e9


def test_copies_to_the_host_are_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 µs each way, and 2 GB/s, by a clock that counts the bytes."""
    copied = []
    monkeypatch.setattr(Tensor, "copy_", lambda tensor, source, **_: copied.append(source.nbytes) or tensor)
    watch = Stopwatch(CPU, budget=0.001)
    watch._clock = lambda: 1e-5 * len(copied) + sum(copied) / 2e9
    link = measure_host_link(watch)
    assert (link.latency, link.bandwidth) == (pytest.approx(1e-5), pytest.approx(2e9))
    assert link.name == "copies within memory"


@pytest.mark.slow
def test_a_whole_profile(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = MeasuredLinks(((None, 1e-5), (3e-5, None)), ((None, 1e9), (3e9, None)), "gloo")
    gather = SizeTable({"bytes": (1e3, 1e6)}, (1e6, 1e8))
    monkeypatch.setattr(calibrate, "measure_links", lambda ranks, device: LinkRates(measured, {"gather": gather}))
    thread_count = torch.get_num_threads()
    profile = calibrate.calibrate(threads=1, name="mine")
    assert torch.get_num_threads() == thread_count
    assert Hardware.from_json(profile.to_json()) == profile
    assert profile.name == "mine"
    assert "1 thread a rank" in profile.device
    assert profile.links == Links(2, Link(2e-5, 2e9, "gloo", gather), measured=measured)
    assert profile.attained_flops["matmul"]["float32"].axes["footprint"] == (2.0**20, 2.0**22)
    assert max(table["float32"].largest for table in profile.attained_flops.values()) == 1
    assert profile.attained_bandwidth.largest == 1
    assert "quartiles" in profile.sources["attained_flops"]
    assert profile.host_link is not None and profile.host_link.bandwidth > 1e8
    assert profile.sources["host_link"].endswith("copies within memory, with which offload is emulated on a CPU")


@pytest.mark.slow
def test_one_rank_has_links_through_the_host(quick: None) -> None:
    profile = calibrate.calibrate(threads=1, ranks=1)
    assert profile.host_link is not None
    link = profile.link(0, 1)
    assert link.latency == pytest.approx(2 * profile.host_link.latency, rel=1e-3)
    assert link.bandwidth == pytest.approx(profile.host_link.bandwidth / 2, rel=1e-3)
    assert profile.sources["links"].startswith("an assumption")


def test_a_gpu_is_timed_on_large_layers() -> None:
    cpu, gpu = (machine_rates.sizes_on(kind) for kind in ("cpu", "cuda"))
    assert max(gpu.matrices["m"]) > 4 * max(cpu.matrices["m"])
    assert max(gpu.streamed) > max(cpu.streamed) and gpu.sample > cpu.sample


def test_float32_and_tfloat32_are_measured_apart() -> None:
    previous_setting = torch.backends.cuda.matmul.allow_tf32
    for allowed in (True, False):
        with calibrate._less_precision(allowed):
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == allowed
    assert torch.backends.cuda.matmul.allow_tf32 == previous_setting
