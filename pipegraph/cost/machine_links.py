"""Measure the links between processes: messages between each two of them, and collectives of several."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from pipegraph import collectives, loopback
from pipegraph.cost.hardware import MeasuredLinks, SizeTable
from pipegraph.device import Device
from pipegraph.errors import RuntimeFault

_TIMEOUT = 120.0  # seconds that all of it may take
_SIZES = tuple(4**power * 1024 for power in range(8))  # of messages: 1 KiB to 16 MiB
_WARM, _SAMPLES = 2, 9

# torch 2.13 has given it another name.
_ALL_GATHER: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class LinkRates:
    """What was measured between ranks.

    Attributes:
        links: latency and bandwidth from each rank to each other one.
        collectives: bytes per second, over the bytes of the whole and the number of ranks, by the field of `Link`.
    """

    links: MeasuredLinks
    collectives: Mapping[str, SizeTable]


def measure_links(ranks: int, device: str, timeout: float = _TIMEOUT) -> LinkRates:
    """Measure the links between each pair of ``ranks`` processes, and collectives among them.

    The backend is gloo, or NCCL with one GPU for each rank.

    Raises RuntimeFault if a process fails or the timeout expires. It leaves no process running.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    store = loopback.open_store()
    deadline = time.monotonic() + timeout
    context = mp.start_processes(
        _rank, (ranks, store.port, backend), nprocs=ranks, join=False, daemon=True, start_method="spawn"
    )
    try:
        while not context.join(timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise RuntimeFault(
                    f"the links between {ranks} ranks were not measured within {timeout:g} s.",
                    "fewer --ranks, or again when the machine does less.",
                )
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeFault(f"the links between {ranks} ranks cannot be measured: {reason}") from None
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    *tables, rates = json.loads(store.get("found"))
    latency, bandwidth = (tuple(map(tuple, rows)) for rows in tables)
    return LinkRates(MeasuredLinks(latency, bandwidth, backend), {name: _table(rate) for name, rate in rates.items()})


def _table(rates: Mapping[str, Sequence[float]]) -> SizeTable:
    """The table of a collective, from number of ranks → the rate with each of the sizes."""
    counts = sorted(map(int, rates))
    axes = {"ranks": tuple(map(float, counts)), "bytes": tuple(map(float, _SIZES))}
    return SizeTable(axes, tuple(tuple(rates[str(count)]) for count in counts))


def _rank(rank: int, ranks: int, port: int, backend: str) -> None:
    """One of the processes. The first one has the result of all pairs, and leaves it in the store."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    loopback.use_loopback(os.environ, replace=True)
    store = dist.TCPStore(loopback.ADDRESS, port, is_master=False)
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
        rates = _collective_rates(rank, ranks, backend, device)
        if rank == 0:
            store.set("found", json.dumps([latency, bandwidth, rates]))
        dist.barrier()
    finally:
        with suppress(Exception):
            dist.destroy_process_group()


def _round_trip(sender: int, receiver: int, rank: int, size: int, device: torch.device) -> float:
    """Seconds to send ``size`` bytes and receive an answer of one byte; 0 on ranks other than the sender."""
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
        Device(device).synchronize()
        samples.append(time.perf_counter() - started)
    return float(np.median(samples[_WARM:]))


def _collective_rates(rank: int, ranks: int, backend: str, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Bytes per second for each size, by collective and number of ranks: 2, 4, … ranks, and all of them.

    All groups with the same number of ranks run at the same time, as in a step: they share the links between ranks.
    """
    counts = sorted({count for count in (2**power for power in range(1, 17)) if count < ranks} | {ranks})
    collective_rates: dict[str, dict[str, list[float]]] = {}
    for count in counts:
        groups = [dist.new_group(list(range(first, first + count))) for first in range(0, ranks - count + 1, count)]
        place = rank // count
        for size in _SIZES if place < len(groups) else ():
            group = groups[place]
            full_tensor = torch.zeros(-(-size // (4 * count)) * count, device=device)  # float32, as gradients are
            part = torch.zeros(len(full_tensor) // count, device=device)
            rows = full_tensor.view(count, -1)
            calls: dict[str, Callable[[], object]] = {
                "gather": partial(_gather, rows, rank % count, group),
                "reduce": partial(_reduce, rows, group),
                "all_reduce": partial(dist.all_reduce, full_tensor, group=group),
            }
            if backend == "gloo":  # with another one it is what `gather` does
                calls["all_gather"] = partial(_ALL_GATHER, full_tensor, part, group=group)
            for name, call in calls.items():
                rates = collective_rates.setdefault(name, {}).setdefault(str(count), [])
                rates.append(full_tensor.nbytes / _usual_seconds(call, device))
    return collective_rates


def _gather(rows: Tensor, place: int, group: dist.ProcessGroup) -> None:
    collectives.start_gather(rows, place, group).wait()


def _reduce(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    work, own_sum = collectives.start_reduce(rows, group)
    work.wait()
    return own_sum()


def _usual_seconds(call: Callable[[], object], device: torch.device) -> float:
    samples = []
    for _ in range(_WARM + _SAMPLES):
        started = time.perf_counter()
        call()
        Device(device).synchronize()
        samples.append(time.perf_counter() - started)
    return float(np.median(samples[_WARM:]))


def fit(times: Sequence[float], both_ways: Sequence[int] = _SIZES) -> tuple[float, float]:
    """(latency, bandwidth) of one direction, from the times of round trips and their bytes in both directions.

    The least squares of relative errors, so that small messages count as much as large ones:
    2 × latency + size ÷ bandwidth = time.
    """
    seconds = np.array(times)
    sizes = np.array(both_ways, dtype=float)
    (latency, per_byte), *_ = np.linalg.lstsq(np.stack([2 / seconds, sizes / seconds], axis=1), np.ones(len(times)))
    fastest = float(np.max(sizes / seconds))
    return max(float(latency), 0.0), float(1 / per_byte) if per_byte > 0 else fastest
