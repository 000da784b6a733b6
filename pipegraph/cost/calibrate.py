"""Measure a `Hardware` profile of this machine, in about a minute."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from msgspec import structs
from torch import Tensor

from pipegraph.cost.busy_ranks import busy_ranks, compute_threads
from pipegraph.cost.hardware import Hardware, Link, Links, SizeTable
from pipegraph.cost.machine_links import LinkRates, fit, measure_links
from pipegraph.cost.machine_rates import (
    Stopwatch,
    measure_bandwidth,
    measure_compute_rates,
    measure_element_rates,
    measure_first_touch,
    measure_kernel_overhead,
)
from pipegraph.device import Device
from pipegraph.kernels.cpu.process import keep_freed_memory, threads_per_rank
from pipegraph.units import format_percent

# ---- host link -------------------------------------------------------------------------------------------------------
# Measure the link from a device to the memory of its host, which ``recompute="offload"`` copies over.


WITHIN_MEMORY = "copies within memory"
"""The name of the link of a CPU, whose memory is that of the host."""

_SIZES = tuple(4**power * 1024 for power in range(3, 9))  # of copies: 64 KiB to 64 MiB


def measure_host_link(stopwatch: Stopwatch) -> Link:
    """Return the link over which a tensor is copied to pinned CPU memory and back.

    On a CPU both are in one memory, and the copies are those with which the runtime emulates offload.
    """
    is_cpu = stopwatch.device.type == "cpu"
    times = [_there_and_back(stopwatch, size, is_pinned=not is_cpu) for size in _SIZES]
    latency, bandwidth = fit(times, [2 * size for size in _SIZES])
    name = WITHIN_MEMORY if is_cpu else f"{Device(stopwatch.device).name} to pinned memory"
    return Link(latency, bandwidth, name)


def _there_and_back(stopwatch: Stopwatch, size: int, is_pinned: bool) -> float:
    device_tensor = torch.zeros(size, dtype=torch.uint8, device=stopwatch.device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned)

    def copy() -> Tensor:
        host.copy_(device_tensor, non_blocking=True)
        return device_tensor.copy_(host, non_blocking=True)

    return stopwatch.seconds(copy)


# ---- calibrate -------------------------------------------------------------------------------------------------------


THROUGH_HOST = "an assumption: from a device to its host and on to the other one, as measured to the host"

_MIB = 2**20
# Bytes that go through the caches around a kernel: none but its own, some that the last cache holds, and more.
_FOOTPRINTS = {"cpu": (0, 8 * _MIB, 128 * _MIB)}
_OWN_FOOTPRINT = 1 * _MIB  # what stands for none in a table, whose sizes are positive
_DTYPES = {
    "cpu": {"float32": torch.float32, "bfloat16": torch.bfloat16},
    "cuda": {
        "float32": torch.float32,
        "tfloat32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    },
}


def calibrate(device: str = "cpu", threads: int | None = None, ranks: int = 2, name: str = "here") -> Hardware:
    """Measure this machine as one of ``ranks`` has it, on a CPU while the others compute, and the links between them.

    ``threads`` is by default what `pipegraph run` gives a rank. Each figure is a median of several runs; ``sources``
    says how far the others are from it. With one rank no links are measured: they are assumed to go through the host.
    """
    chosen = threads or threads_per_rank(ranks)
    where = torch.device(device)
    links = measure_links(ranks, device) if ranks > 1 else None
    if where.type == "cpu":
        keep_freed_memory()  # as a rank does
    with compute_threads(chosen), busy_ranks(ranks - 1 if device == "cpu" else 0, chosen):
        watches = [Stopwatch(where, footprint=size) for size in _FOOTPRINTS.get(where.type, (0,))]
        noise: dict[str, float] = {}
        flops = {}
        for name_of_dtype, dtype in _DTYPES[where.type].items():
            with _less_precision(is_allowed=name_of_dtype == "tfloat32"):
                kind_tables = _over_footprints(watches, partial(measure_compute_rates, dtype=dtype))
            if kind_tables:
                flops[name_of_dtype] = kind_tables
        noise["attained_flops"] = _noise(watches)
        bandwidth = _over_footprints(watches, lambda watch: {"": measure_bandwidth(watch)})[""]
        noise["attained_bandwidth"] = _noise(watches)
        rates = measure_element_rates(watches[0])
        with _less_precision(is_allowed=True):  # or Inductor warns that it is not
            kernel = measure_kernel_overhead(watches[0])
        noise["element_rates"] = _noise(watches)
        first_touch = measure_first_touch(watches[0])
        noise["first_touch"] = _noise(watches)
        measured = measure_host_link(watches[-1])
        host_link = structs.replace(
            measured, latency=_rounded(measured.latency), bandwidth=_rounded(measured.bandwidth)
        )
        noise["host_link"] = _noise(watches)
    peaks = {dtype: max(table.largest for table in tables.values()) for dtype, tables in flops.items()}
    return Hardware(
        name=name,
        device=f"{Device(where).name}, {chosen} thread{'s' if chosen > 1 else ''} a rank, torch {torch.__version__}",
        memory_bytes=Device(where).memory_bytes,
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
        links=_through_host(host_link) if links is None else _links(links),
        host_link=host_link,
        sources=_sources(noise, where) | ({"links": THROUGH_HOST} if links is None else {}),
    )


def _over_footprints(
    watches: Sequence[Stopwatch], measure: Callable[[Stopwatch], Mapping[str, SizeTable]]
) -> dict[str, SizeTable]:
    """What is measured, over how much goes through the caches around it."""
    measurements = {max(watch.footprint, _OWN_FOOTPRINT): measure(watch) for watch in watches}
    kinds = next(iter(measurements.values()))
    return {
        kind: SizeTable.stacked("footprint", {float(size): tables[kind] for size, tables in measurements.items()})
        for kind in kinds
    }


def _noise(watches: Sequence[Stopwatch]) -> float:
    """The usual distance between the quartiles of what was measured since the last call, as part of the median."""
    spreads = [spread for watch in watches for spread in watch.spreads]
    for watch in watches:
        watch.spreads.clear()
    return statistics.median(spreads or [0.0])


def _sources(noise: Mapping[str, float], device: torch.device) -> dict[str, str]:
    measured = "measured by pipegraph calibrate"
    sources = {
        place: f"{measured}: medians; the quartiles are {format_percent(spread, decimals=0)} of them apart"
        for place, spread in noise.items()
    }
    most = f"{measured}: the most that a kernel attained"
    if device.type == "cpu":
        sources["host_link"] += f"; {WITHIN_MEMORY}, with which offload is emulated on a CPU"
    return {
        "memory_bytes": "what the system says; ranks on a CPU share it",
        "peak_flops": most,
        "memory_bandwidth": most,
        "kernel_floor": measured,
        "kernel_overhead": measured,
        "links": (
            f"{measured}: medians of round trips from 1 KiB to 16 MiB, one pair of ranks at a time, and of collectives"
        ),
        **sources,
    }


def _links(link_rates: LinkRates) -> Links:
    """The tables, and for ranks beyond them the median link."""
    measured = link_rates.links
    rows = range(measured.ranks)
    pairs = [(rank, peer) for rank in rows for peer in rows if rank != peer]

    def median(matrix: Sequence[Sequence[float | None]]) -> float:
        return _rounded(statistics.median(matrix[rank][peer] or 0.0 for rank, peer in pairs))

    tables = {name: table.map(_rounded) for name, table in link_rates.collectives.items()}
    usual = Link(median(measured.latency), median(measured.bandwidth), measured.name, **tables)
    return Links(ranks_per_node=measured.ranks, intra_node=usual, measured=measured)


def _through_host(host_link: Link) -> Links:
    """The link between ranks if only one of them is measured: out of one device, and into the other."""
    link = Link(_rounded(2 * host_link.latency), _rounded(host_link.bandwidth / 2), "through the host")
    return Links(ranks_per_node=1, intra_node=link)


@contextmanager
def _less_precision(is_allowed: bool) -> Iterator[None]:
    """A context in which products and convolutions in float32 may round to tfloat32, or may not."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    previous_flags = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = is_allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = previous_flags


def _part(table: SizeTable, peak: float) -> SizeTable:
    return table.map(lambda figure: _rounded(figure / peak))


def _rounded(figure: float) -> float:
    """Four digits: more are noise."""
    return float(f"{figure:.4g}")
