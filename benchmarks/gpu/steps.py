"""Steps of a whole pipeline on one device: the time between its actions, and copies to CPU memory at the same time."""

from __future__ import annotations

import gc
import statistics
import warnings
from dataclasses import dataclass

import torch

import pipegraph
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.stopwatch import seconds_of
from pipegraph.runtime.measurements import ActionTimes, SavedBytes

MICROBATCHES = 4
_WARM_UP = 3


def measure_steps(setting: Setting) -> dict[str, StepTimes]:
    """Run steps of each kind that this device has."""
    step_times = {"min-cut": measure_step(setting, "min-cut")}
    if setting.is_gpu:
        step_times["min-cut, CUDA graphs"] = measure_step(setting, "min-cut", cuda_graphs=True)
    return {**step_times, "offload": measure_step(setting, "offload")}


@dataclass(frozen=True)
class StepTimes:
    """What a step takes with all stages on one device.

    Attributes:
        seconds: the median.
        actions: the sum over its actions, by events of the device's stream.
        saved: the most bytes kept for backwards in the device's memory.
        reserved: the most bytes that torch's allocator has taken, what other steps left aside; None on a CPU.
    """

    seconds: float
    actions: float
    saved: int
    reserved: int | None


def measure_step(setting: Setting, recompute: str, cuda_graphs: bool = False) -> StepTimes:
    """Run steps of zb-h1 on the package's three stages, all in this process."""
    reserved_before = 0
    if setting.is_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        reserved_before = torch.cuda.memory_reserved()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*holds no weights", UserWarning)
        pipe = pipegraph.Pipeline(
            setting.package,
            "zb-h1",
            MICROBATCHES,
            lambda output, target: output["logits"].float().square().mean(),
            device=str(setting.device),
            recompute=recompute,
            cuda_graphs=cuda_graphs,
        )
    tokens = torch.randint(512, (MICROBATCHES * setting.rows, setting.length), device=setting.device)

    def step() -> None:
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(input_ids=tokens)

    state = [tensor for stage in pipe.stages.values() for tensor in (*stage.parameters(), *stage.buffers())]
    saved = SavedBytes([*state, tokens])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'recompute="offload" is emulated', UserWarning)
        with pipe.observe(saved):
            step()
    for _ in range(_WARM_UP):
        step()
    seconds, actions = [], []
    for _ in range(setting.rounds):
        times = ActionTimes(setting.device)
        times.begin_step()
        with pipe.observe(times):
            seconds.append(seconds_of(step, setting.device))
        done = times.end_step()
        actions.append(sum(done.busy(rank) for rank in pipe.ranks))
    saved_bytes = sum(saved.peak(rank) or 0 for rank in pipe.ranks)
    reserved = torch.cuda.max_memory_reserved() - reserved_before if setting.is_gpu else None
    return StepTimes(statistics.median(seconds), statistics.median(actions), saved_bytes, reserved)
