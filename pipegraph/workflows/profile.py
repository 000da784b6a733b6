"""``pipegraph.profile``: a training loop recorded, for TensorBoard, Perfetto and ``pipegraph trace``."""

from __future__ import annotations

from os import PathLike

from pipegraph.cost.hardware import Hardware
from pipegraph.report.tensorboard import TensorBoardWriter, check_tensorboard
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.tracing.recording import profile as recording


def profile(
    pipe: Pipeline,
    folder: str | PathLike[str],
    *,
    wait: int = 0,
    warmup: int = 1,
    active: int = 3,
    repeat: int = 1,
    hardware: Hardware | None = None,
) -> recording.Profile:
    """Record the steps of a training loop into a new folder inside ``folder``: TensorBoard's log directory.

    As with ``torch.profiler.schedule``, ``wait`` steps are left alone, ``warmup`` steps warm the profiler up,
    ``active`` steps are recorded, a Chrome trace for each rank, and that ``repeat`` times, or with 0 until the loop
    ends. A loop that ends earlier writes the steps that it has recorded. Of every step, those left alone included,
    loss, times, throughput and memory go to TensorBoard, beside the plan and timelines. ``hardware`` has the links that
    a step is predicted with there: by default those of the profile that priced the package.

        with pipegraph.profile(pipe, "runs") as profiler:
            for tokens, labels in batches:
                result = pipe.step(tokens, target=labels)
                optimizer.step()
                optimizer.zero_grad()
                profiler.step(result)
        print(profiler.folder)

    All processes of the pipeline do this together. Raises PipegraphError for numbers that record nothing, where
    tensorboard is not installed, and on entering it in every process where one of them cannot write there, or is
    recorded by another profile.
    """
    check_tensorboard()
    return recording.profile(
        pipe,
        folder,
        wait=wait,
        warmup=warmup,
        active=active,
        repeat=repeat,
        sink=lambda run: TensorBoardWriter(run, pipe, hardware),
    )
