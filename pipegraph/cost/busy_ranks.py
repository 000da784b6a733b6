"""Time code under the conditions of a rank in a step: with its number of threads, while other ranks compute.

On a CPU the other ranks share memory bandwidth, caches and clock, so that a single rank is faster.

    with compute_threads(threads), busy_ranks(ranks - 1, threads):
        …  # code that is timed here takes as long as in a step

Run as a module, this is one such rank: it trains a small network until its standard input ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_ROWS, _WIDTH = 512, 512


@contextmanager
def busy_ranks(count: int, threads: int) -> Iterator[None]:
    """Run the body while ``count`` other processes compute with ``threads`` threads each. They begin before it.

    A process that cannot be started is left out: then times are those of fewer ranks.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "pipegraph.cost.busy_ranks"]
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # wait until it has begun or ended
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@contextmanager
def compute_threads(count: int | None) -> Iterator[None]:
    """Let torch compute with ``count`` threads in the body; None leaves the number unchanged."""
    previous_count = torch.get_num_threads()
    torch.set_num_threads(count or previous_count)
    try:
        yield
    finally:
        torch.set_num_threads(previous_count)


def _train() -> None:
    network = nn.Sequential(
        nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH), nn.LayerNorm(_WIDTH)
    )
    batch = torch.randn(_ROWS, _WIDTH)
    begun = False
    while True:
        network(batch).square().mean().backward()
        if not begun:
            print("begun", flush=True)
        begun = True


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    _train()
