"""Training loops that are recorded, in this process or as a rank of several."""

from __future__ import annotations

import errno
import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pipegraph
from pipegraph import Pipeline
from pipegraph.runtime.step_data import StepResult
from pipegraph.tracing.recording.profiler import ActionSpans
from tests.runtime.packages import batch, loss
from tests.runtime.pipelines import pipeline

MICROBATCHES = 4
STATIC = ["events.out.tfevents", "pipeline.json", "run.json", "schedule.csv"]
ONE_WINDOW = sorted([*STATIC, "rank_00.0.pt.trace.json.gz", "rank_01.0.pt.trace.json.gz"])
WIDTH = 16


def make_pipeline(package: Path, kernels: str = "eager") -> Pipeline:
    return pipeline(package, "1f1b", kernels=kernels, microbatches=MICROBATCHES, loss_fn=loss)


class Loop:
    """Training steps on a pipeline."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe = pipe
        self.optimizer = torch.optim.SGD(list(pipe.parameters()), lr=0.01)
        (self.inputs,) = batch(pipe.package.manifest, MICROBATCHES).values()

    def step(self) -> StepResult:
        result = self.pipe.step(self.inputs, target=torch.zeros(len(self.inputs)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result


def read(file: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    return trace


def actions(trace: dict[str, Any], category: str = "user_annotation") -> list[dict[str, Any]]:
    """The spans of actions, in the order of time."""
    spans = [event for event in trace["traceEvents"] if event.get("cat") == category and "kind" in event["args"]]
    return sorted(spans, key=lambda event: float(event["ts"]))


def record(
    rank: int, package: str, folder: str, steps: int, options: dict[str, int]
) -> tuple[str, list[float], int, int]:
    """Record `steps` steps. Return the run's folder, the losses, and when this began and ended."""
    loop, losses = Loop(make_pipeline(Path(package))), []
    began = time.time_ns()
    with pipegraph.profile(loop.pipe, folder, **options) as profiler:
        for _ in range(steps):
            result = loop.step()
            profiler.step(result)
            losses += [] if result.loss is None else [float(result.loss)]
    return str(profiler.folder), losses, began, time.time_ns()


def fail_in_step(rank: int, package: str, folder: str, failing: int, at: int) -> float:
    """One rank raises at step `at` of the loop. How long this one takes to notice."""
    loop = Loop(make_pipeline(Path(package)))
    try:
        with pipegraph.profile(loop.pipe, folder, active=2, repeat=2) as profiler:
            for number in range(6):
                started = time.monotonic()
                if rank == failing and number == at:
                    raise ValueError("broken on purpose")
                profiler.step(loop.step())
    except (ValueError, pipegraph.RuntimeFault):
        pass  # the process ends
    return time.monotonic() - started


def fail_in_writing(rank: int, package: str, folder: str, failing: int) -> None:
    """The disk of one rank is full when it writes what was recorded."""
    loop = Loop(make_pipeline(Path(package)))
    with pytest.MonkeyPatch.context() as patch, pipegraph.profile(loop.pipe, folder, active=1) as profiler:
        if rank == failing:
            patch.setattr(Path, "write_bytes", full)
        for _ in range(2):
            profiler.step(loop.step())


def full(file: Path, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def enter(rank: int, package: str, folders: list[str]) -> None:
    """Profile into another folder on each rank."""
    with pipegraph.profile(make_pipeline(Path(package)), folders[rank]):
        raise AssertionError("it could be entered")


def names(folder: Path) -> list[str]:
    """The files of a folder, hidden ones too, with the number of a window as its place in time; [] if it is gone."""
    file_names = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    file_names = [re.sub(r"^(events\.out\.tfevents)\..*", r"\1", name) for name in file_names]
    windows = sorted({name.split(".")[1] for name in file_names if name.startswith("rank_")})
    for place, digits in enumerate(windows):
        file_names = [name.replace(digits, str(place)) for name in file_names]
    return file_names


def observed(pipe: Pipeline) -> bool:
    return any(isinstance(observer, ActionSpans) for observer, _ in pipe._observers._observers.values())
