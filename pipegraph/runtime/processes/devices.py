"""The device of a process, and whether the ranks' backend serves tensors there."""

from __future__ import annotations

import os

import torch

from pipegraph.errors import ArgumentError, PipegraphError
from pipegraph.runtime import internals
from pipegraph.runtime.processes.rank_grid import PIPELINE, RankGrid


def check_backend(grid: RankGrid, device: torch.device) -> None:
    """Raise ArgumentError for ranks with GPUs that share layers or train alike, and have no NCCL for it.

    Over gloo ranks of FSDP and of tensor parallelism on an H100 were gone without a word, with torch 2.11.
    """
    if device.type == "cuda" and not internals.uses_nccl(device) and grid.size > grid.length(PIPELINE):
        names = [name for name in grid.names if name != PIPELINE and grid.length(name) > 1]
        raise ArgumentError(
            f"the default group was made for gloo, which does not serve tensors on a GPU along {', '.join(names)}.\n"
            'Try: torch.distributed.init_process_group("nccl") and a GPU for each rank, or a mesh of pp alone.'
        )


def local_device(device: str | torch.device) -> torch.device:
    """Return `device`. Plain "cuda" under a launcher is the GPU of this process's local rank."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise PipegraphError(f"{device!r} is no device of torch: {error}.\nTry: cpu or cuda.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise PipegraphError(f"device {str(device)!r} was asked for, and torch finds no GPU.\nTry: device='cpu'.")
    if str(device) == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', torch.cuda.current_device())}"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen
