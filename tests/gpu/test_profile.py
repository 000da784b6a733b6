"""A profile of a pipeline on a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

import pipegraph
from tests.gpu.gpu_models import MICROBATCHES, loss_of, split


def test_kernels_of_the_gpu_lie_in_the_trace_of_the_rank_that_launched_them(tmp_path: Path) -> None:
    case = split(tmp_path, "tests/models/rotary.py")
    pipe = pipegraph.Pipeline(case.package, "1f1b", MICROBATCHES, loss_of, kernels="eager", device="cuda")
    args, kwargs = case.batch()
    with pipegraph.profile(pipe, tmp_path / "runs", wait=1, warmup=1, active=2, repeat=1) as profiler:
        for _ in range(4):
            profiler.step(pipe.step(*args, target=None, **kwargs))
    files = sorted(profiler.folder.rglob("*.pt.trace.json.gz"))
    assert len(files) == pipe.schedule.ranks
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        assert sum(event.get("cat") == "kernel" for event in events) > 10, file.name
    assert torch.cuda.max_memory_allocated() > 0
