"""Measure what this machine attains, in about a minute: a `Hardware` profile of its own."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipegraph.cost.busy_ranks import busy_ranks, compute_threads
from pipegraph.cost.hardware import Hardware, Link, Links, MeasuredLinks
from pipegraph.cost.machine_rates import (
    Stopwatch,
    measure_bandwidth,
    measure_compute_rates,
    measure_element_rates,
    measure_first_touch,
    measure_kernel_overhead,
)
from pipegraph.cost.size_table import SizeTable
from pipegraph.errors import RuntimeFault
from pipegraph.kernels.threads import threads_per_rank

_MIB = 2**20
# Bytes that go through the caches around a kernel: none but its own, some that the last cache holds, and more.
_FOOTPRINTS = {"cpu": (0, 8 * _MIB, 128 * _MIB)}
_OWN = 1 * _MIB  # what stands for none in a table, whose sizes are positive
_DTYPES = (torch.float32, torch.bfloat16)

_TIMEOUT = 120.0  # seconds that measuring the links may take
_SIZES = tuple(4**power * 1024 for power in range(8))  # of messages over the links: 1 KiB to 16 MiB
_WARM, _SAMPLES = 2, 9  # round trips


def calibrate(device: str = "cpu", threads: int | None = None, ranks: int = 2, name: str = "here") -> Hardware:
    """Measure this machine as one of ``ranks`` has it, on a CPU while the others compute, and the links between them.

    ``threads`` is by default what `pipegraph run` gives a rank. Each figure is a median of several runs; ``sources``
    says how far the others are from it.
    """
    chosen = threads or threads_per_rank(ranks)
    links = measure_links(ranks, device)
    where = torch.device(device)
    with compute_threads(chosen), busy_ranks(ranks - 1 if device == "cpu" else 0, chosen):
        watches = [Stopwatch(where, footprint=size) for size in _FOOTPRINTS.get(where.type, (0,))]
        noise: dict[str, float] = {}
        flops = {}
        for dtype in _DTYPES:
            found = _over_footprints(watches, partial(measure_compute_rates, dtype=dtype))
            if found:
                flops[str(dtype).removeprefix("torch.")] = found
        noise["attained_flops"] = _noise(watches)
        bandwidth = _over_footprints(watches, lambda watch: {"": measure_bandwidth(watch)})[""]
        noise["attained_bandwidth"] = _noise(watches)
        rates, kernel = measure_element_rates(watches[0]), measure_kernel_overhead(watches[0])
        noise["element_rates"] = _noise(watches)
        first_touch = measure_first_touch(watches[0])
        noise["first_touch"] = _noise(watches)
    peaks = {dtype: max(table.largest for table in tables.values()) for dtype, tables in flops.items()}
    return Hardware(
        name=name,
        device=f"{_device_name(where)}, {chosen} thread{'s' if chosen > 1 else ''} a rank, torch {torch.__version__}",
        memory_bytes=_memory_bytes(where),
        peak_flops={dtype: _rounded(peak) for dtype, peak in peaks.items()},
        attained_flops={
            kind: {dtype: _part(tables[kind], peaks[dtype]) for dtype, tables in flops.items()}
            for kind in next(iter(flops.values()))
        },
        memory_bandwidth=_rounded(bandwidth.largest),
        attained_bandwidth=_part(bandwidth, bandwidth.largest),
        kernel_floor=_rounded(kernel),
        # Launches run ahead of a GPU; on a CPU they are a part of the work.
        kernel_overhead=_rounded(kernel) if where.type == "cpu" else 0.0,
        element_rates={function: _rounded(rate) for function, rate in rates.items()},
        first_touch=None if first_touch is None else first_touch.map(_rounded),
        links=_links(links),
        sources=_sources(noise),
    )


def _over_footprints(
    watches: Sequence[Stopwatch], measure: Callable[[Stopwatch], Mapping[str, SizeTable]]
) -> dict[str, SizeTable]:
    """What is measured, over how much goes through the caches around it."""
    found = {max(watch.footprint, _OWN): measure(watch) for watch in watches}
    kinds = next(iter(found.values()))
    return {
        kind: SizeTable.stacked("footprint", {float(size): tables[kind] for size, tables in found.items()})
        for kind in kinds
    }


def _noise(watches: Sequence[Stopwatch]) -> float:
    """The usual distance between the quartiles of what was measured since the last call, as part of the median."""
    spreads = [spread for watch in watches for spread in watch.spreads]
    for watch in watches:
        watch.spreads.clear()
    return statistics.median(spreads or [0.0])


def _sources(noise: Mapping[str, float]) -> dict[str, str]:
    measured = "measured by pipegraph calibrate"
    sources = {
        place: f"{measured}: medians; the quartiles are {spread:.0%} of them apart" for place, spread in noise.items()
    }
    most = f"{measured}: the most that a kernel attained"
    return {
        "memory_bytes": "what the system says; ranks on a CPU share it",
        "peak_flops": most,
        "memory_bandwidth": most,
        "kernel_floor": measured,
        "kernel_overhead": measured,
        "links": f"{measured}: medians of round trips from 1 KiB to 16 MiB, one pair of ranks at a time",
        **sources,
    }


def _links(measured: MeasuredLinks) -> Links:
    """The table, and for ranks beyond it the median link."""
    rows = range(measured.ranks)
    pairs = [(rank, other) for rank in rows for other in rows if rank != other]

    def median(matrix: Sequence[Sequence[float | None]]) -> float:
        return _rounded(statistics.median(matrix[rank][other] or 0.0 for rank, other in pairs))

    usual = Link(median(measured.latency), median(measured.bandwidth), measured.name)
    return Links(ranks_per_node=measured.ranks, intra_node=usual, measured=measured)


def _part(table: SizeTable, peak: float) -> SizeTable:
    return table.map(lambda figure: _rounded(figure / peak))


def _rounded(figure: float) -> float:
    """Four digits: more are noise."""
    return float(f"{figure:.4g}")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure_links(ranks: int, device: str, timeout: float = _TIMEOUT) -> MeasuredLinks:
    """Latency and bandwidth from each of so many ranks to each other one, over gloo, or NCCL with a GPU each.

    Raises RuntimeFault where a process fails or the time is over. No process is left then.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    # Port 0: the system chooses one that is free.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + timeout
    context = mp.start_processes(
        _rank, (ranks, store.port, backend), nprocs=ranks, join=False, daemon=True, start_method="spawn"
    )
    try:
        while not context.join(timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise RuntimeFault(
                    f"the links between {ranks} ranks were not measured within {timeout:g} s.\n"
                    f"Try: fewer --ranks, or again when the machine does less."
                )
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeFault(f"the links between {ranks} ranks cannot be measured: {reason}") from None
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    latency, bandwidth = (tuple(map(tuple, rows)) for rows in json.loads(store.get("found")))
    return MeasuredLinks(latency, bandwidth, backend)


def _rank(rank: int, ranks: int, port: int, backend: str) -> None:
    """One of the processes. The first one has the result of all pairs, and leaves it in the store."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=ranks)
    try:
        latency: list[list[float | None]] = [[None] * ranks for _ in range(ranks)]
        bandwidth: list[list[float | None]] = [[None] * ranks for _ in range(ranks)]
        for sender in range(ranks):
            for receiver in range(ranks):
                if sender == receiver:
                    continue
                times = [_round_trip(sender, receiver, rank, size, device) for size in _SIZES]
                shared = torch.tensor(times, dtype=torch.float64, device=device)
                dist.broadcast(shared, sender)
                latency[sender][receiver], bandwidth[sender][receiver] = fit(shared.tolist())
        if rank == 0:
            store.set("found", json.dumps([latency, bandwidth]))
        dist.barrier()
    finally:
        with suppress(Exception):
            dist.destroy_process_group()


def _round_trip(sender: int, receiver: int, rank: int, size: int, device: torch.device) -> float:
    """Seconds from sending so many bytes to the answer of one; 0 on other ranks than the sender."""
    if rank not in (sender, receiver):
        return 0.0
    message, answer = (
        torch.zeros(size, dtype=torch.uint8, device=device),
        torch.zeros(1, dtype=torch.uint8, device=device),
    )
    samples = []
    for _ in range(_WARM + _SAMPLES):
        started = time.perf_counter()
        if rank == sender:
            dist.send(message, receiver)
            dist.recv(answer, receiver)
        else:
            dist.recv(message, sender)
            dist.send(answer, sender)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - started)
    return float(np.median(samples[_WARM:]))


def fit(times: list[float]) -> tuple[float, float]:
    """(latency, bandwidth) of one way, from the times of a round trip with each of the sizes.

    The least squares of relative errors, so that small messages count as much as large ones:
    2 × latency + size ÷ bandwidth = time.
    """
    seconds = np.array(times)
    sizes = np.array(_SIZES, dtype=float)
    (latency, per_byte), *_ = np.linalg.lstsq(np.stack([2 / seconds, sizes / seconds], axis=1), np.ones(len(times)))
    fastest = float(np.max(sizes / seconds))
    return max(float(latency), 0.0), float(1 / per_byte) if per_byte > 0 else fastest
