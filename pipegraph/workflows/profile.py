"""``pipegraph.profile``: a training loop recorded for TensorBoard, Perfetto and ``pipegraph trace``."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from types import NoneType

import torch

from pipegraph.arguments import require_type
from pipegraph.cost.hardware import Hardware
from pipegraph.errors import PipegraphError
from pipegraph.report.tensorboard import TensorBoardWriter, check_tensorboard
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.tracing.recording.profiler import LoopProfiler


def profile(
    pipe: Pipeline,
    folder: str | PathLike[str],
    *,
    wait: int = 0,
    warmup: int = 1,
    active: int = 3,
    repeat: int = 1,
    hardware: Hardware | None = None,
) -> LoopProfiler:
    """Record the steps of a training loop into a new folder inside ``folder``: TensorBoard's log directory.

    Active steps are recorded as Chrome traces, one for each rank. Loss, times, throughput and memory of every step go
    to TensorBoard, also of those that are skipped, with the plan and timelines. A loop that ends early writes the steps
    that it has recorded.

        with pipegraph.profile(pipe, "runs") as profiler:
            for tokens, labels in batches:
                result = pipe.step(tokens, target=labels)
                optimizer.step()
                optimizer.zero_grad()
                profiler.step(result)
        print(profiler.folder)

    Collective: every process must call it, those of a whole mesh, enter the context, and call ``profiler.step``.

    Args:
        pipe: the pipeline that the loop runs.
        folder: where the run's folder is made.
        wait: steps to skip, as in ``torch.profiler.schedule``.
        warmup: steps that warm the profiler up.
        active: steps to record, 1 or more.
        repeat: how often to do these three in turn; 0 repeats them until the loop ends.
        hardware: the profile whose links a step is predicted with; by default the one that priced the package.

    Raises:
        PipegraphError: a number is too small or tensorboard is not installed; on entering the context, and in every
            process, if one process cannot write there or another profiler records it.
    """
    require_type(pipe, Pipeline, "profile() takes a pipegraph.Pipeline", 'pipegraph.profile(pipe, "runs")')
    require_type(folder, (str, PathLike), "folder is a folder", 'pipegraph.profile(pipe, "runs")')
    require_type(hardware, (Hardware, NoneType), "hardware is a profile", 'hardware=Hardware.load("h100")')
    check_tensorboard()
    steps = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    for name, number in steps.items():
        least = 1 if name == "active" else 0
        if type(number) is not int or number < least:
            raise PipegraphError(f"{name} is {number!r}: give it {least} or more.", "profile(pipe, folder, active=3).")
    schedule = torch.profiler.schedule(**steps)
    return LoopProfiler(pipe, Path(folder), schedule, lambda run: TensorBoardWriter(run, pipe, hardware))
