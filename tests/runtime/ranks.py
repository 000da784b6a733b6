"""Starting real processes, one per rank over gloo, and what they run."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipegraph.errors import PipegraphError

# Ranks are forked from a process that has imported torch and done nothing with it, so that it has no threads: importing
# takes seconds, forking none. It ends with the process that asked for it.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.testing", "pipegraph.runtime.pipeline"]
)

# A failure of another rank is noticed within this time, and not at the end of a timeout.
NO_HANG_SECONDS = 10.0


def run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    store: str = "file",
    timeout: float = 60.0,
    hung: int | None = None,
    backend: str = "gloo",
    method: str = "forkserver",
) -> list[Any]:
    """What `function(rank, *args)` returns on each rank, or the text of its error; None if it was killed.

    Nothing outlives the call. `store` is where the default group meets: a "file", or a "tcp" store that rank 0 hosts.
    Rank `hung` need not end. On a GPU the method is "spawn": the preloaded modules have asked for GPUs, and a process
    that is forked after that cannot use one.
    """
    context: Any = _CONTEXT if method == "forkserver" else multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_main, args=(function, rank, ranks, folder, store, backend, args), daemon=True)
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.start()
            for rank, process in enumerate(processes):
                if rank != hung:
                    process.join(max(0.0, deadline - time.monotonic()))
            late = [rank for rank, process in enumerate(processes) if rank != hung and process.is_alive()]
        finally:  # pytest's time limit included
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        assert not late, f"ranks {late} did not end within {timeout} s"
        files = [Path(folder, f"{rank}.pt") for rank in range(ranks)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _main(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    folder: str,
    store: str,
    backend: str,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["PIPEGRAPH_VERIFY"] = "1"  # a buffer that is released too early shows
    if store == "tcp":
        meeting: Any = _tcp_store(rank, ranks, Path(folder, "port"))
    else:
        meeting = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=ranks)
    dist.barrier()  # a rank that ends before the others are connected fails them
    try:
        result = function(rank, *args)
    except PipegraphError as error:
        result = f"{type(error).__name__}: {error}"
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, f"{folder}/{rank}.tmp")
    os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}.pt")
    os._exit(0)  # as abruptly as a crash: nobody may depend on a tidy end


def _tcp_store(rank: int, ranks: int, port_file: Path) -> dist.TCPStore:
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".tmp").write_text(str(store.port))
        port_file.with_suffix(".tmp").rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), ranks, is_master=False)
