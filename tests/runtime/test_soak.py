"""A long run takes no more than a short one: memory, threads and descriptors stay as they are after the warm-up."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from pipegraph.package import Package
from tests.runtime import ranks
from tests.runtime.packages import batch, loss, write
from tests.runtime.parity import arguments
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="what a process holds is read from /proc"),
]
WARM_UP, STEPS = 400, 2000
LARGEST = 4 * 2**20
"""Bytes by which a process may grow: a step that keeps 2.5 KiB would show."""


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    bytes: int
    objects: int
    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        threads, descriptors = (len(os.listdir(f"/proc/self/{directory}")) for directory in ("task", "fd"))
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects()), threads, descriptors)


def soak(rank: int, folder: str) -> tuple[Usage, Usage]:
    """What a process holds after the warm-up and at the end. It trains, and evaluates now and then."""
    package = Package.open(folder)
    pipe = pipeline(package, "zb-h1", kernels="eager", microbatches=4, loss_fn=loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    args, kwargs = arguments(package, batch(package.manifest, 4))
    target = torch.zeros(len(args[0]))
    usage = []
    for step in range(STEPS):
        if step == WARM_UP:
            usage.append(Usage.now())
        pipe.step(*args, target=target, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            pipe.eval(*args, **kwargs)
    usage.append(Usage.now())
    return usage[0], usage[1]


def check(early: Usage, late: Usage) -> None:
    assert late.threads <= early.threads
    assert late.descriptors <= early.descriptors
    assert late.objects - early.objects < (STEPS - WARM_UP) / 10
    assert late.bytes - early.bytes < LARGEST


def test_in_one_process(tmp_path: Path) -> None:
    """In a separate process: in this one, the usage that other tests have left may change."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        check(*pool.submit(soak, 0, str(write(chain(2), tmp_path / "chain"))).result())


def test_in_two_processes(tmp_path: Path) -> None:
    for usage in ranks.run(soak, 2, str(write(chain(2), tmp_path / "chain")), timeout=500):
        check(*usage)
