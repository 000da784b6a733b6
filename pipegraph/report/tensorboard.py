"""Writing a run for TensorBoard: scalars of every step, the plan, timelines, and the run's settings.

Rank 0's process writes all of it into one folder, which TensorBoard shows as one run.
"""

from __future__ import annotations

import importlib.util
from os import PathLike
from typing import Any

from pipegraph.cost.hardware import Hardware
from pipegraph.errors import PipegraphError
from pipegraph.package import Package
from pipegraph.planner.step_prediction import predict_step
from pipegraph.report.text import markdown, markdown_table
from pipegraph.report.text.package_tables import (
    explain_cuts,
    package_title,
    short_boundary_table,
    short_stage_table,
)
from pipegraph.report.text.schedule_report import schedule_title
from pipegraph.report.timeline_picture import timeline_drawing
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.schedule import Schedule, Timeline
from pipegraph.tracing.recording.step_figures import StepFigures

_MIB = 2**20
_FLUSHED = 5  # seconds until a figure is on disk; flushing it at every step would slow the steps


def check_tensorboard() -> None:
    """Raise PipegraphError if tensorboard is not installed. Call it on every rank, so that none waits for another."""
    if importlib.util.find_spec("tensorboard") is None:
        raise PipegraphError(
            "A run cannot be written for TensorBoard: tensorboard is not installed.",
            "pip install 'pipegraph[tensorboard]'",
        )


class TensorBoardWriter:
    """Writes `StepFigures` and timelines of all ranks into a run's folder.

    Scalars, by step: ``loss``, ``bubble``, ``time/step`` and ``time/step_predicted``, ``time/iteration`` (with the
    optimizer), ``throughput/samples_per_second`` and ``throughput/tokens_per_second`` of whole iterations and of all
    data-parallel ranks, ``rank_00/time/forward`` and so on for each of `PARTS`, also ``rank_00/time/collectives`` in a
    mesh whose schedule has collectives, ``rank_00/memory/peak_MiB``; a rank has its number in the mesh. With all ranks
    in one process there is one ``memory/peak_MiB``, and no bubble. The first step compiles, and would set the scale of
    all other steps: its times have separate tags, ``first_step/step`` and ``first_step/iteration``, and its other
    figures that depend on time are left out. Text: ``plan``. Images: ``timeline/predicted`` and
    ``timeline/measured``, of a mesh's first pipeline. Hyper-parameters: the schedule, sizes, the mesh, the model,
    kernels, recompute and device.
    """

    def __init__(self, folder: str | PathLike[str], pipe: Pipeline, hardware: Hardware | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        package, self._schedule = pipe.package, pipe.schedule
        in_turn = len(pipe.ranks) == self._schedule.ranks > 1
        processes = 1 if in_turn else pipe.grid.size
        expected = predict_step(package.manifest, self._schedule, hardware, in_turn)
        self._expected = expected.step
        self._writer = SummaryWriter(str(folder), flush_secs=_FLUSHED)
        self._writer.add_text("plan", _plan(package, self._schedule), 0)
        self._add_settings(_settings(pipe, processes), ["time/step", *([] if in_turn else ["bubble"])])
        if expected.timeline is not None:
            self._add_timeline("predicted", expected.timeline, 0, "predicted")

    def step(self, figures: StepFigures) -> None:
        """Write the scalars of a step."""
        scalars: dict[str, float | None] = {"loss": figures.loss, "time/step_predicted": self._expected}
        if figures.index == 0:
            scalars |= {"first_step/step": figures.seconds, "first_step/iteration": figures.iteration}
        else:
            scalars |= _timed(figures)
        for process, peak in enumerate(figures.peak_bytes):
            prefix = f"rank_{process:02}/" if len(figures.peak_bytes) > 1 else ""
            scalars[f"{prefix}memory/peak_MiB"] = peak / _MIB
        for name, figure in scalars.items():
            if figure is not None:
                self._writer.add_scalar(name, figure, figures.index)

    def timeline(self, timeline: Timeline, step: int) -> None:
        """Write the image of a step as it was measured."""
        self._add_timeline("measured", timeline, step, f"measured, step {step}")

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _add_timeline(self, tag: str, timeline: Timeline, step: int, title: str) -> None:
        import numpy as np

        image = timeline_drawing(self._schedule, timeline, title).to_image()
        self._writer.add_image(f"timeline/{tag}", np.asarray(image), step, dataformats="HWC")

    def _add_settings(self, settings: dict[str, str | float], metrics: list[str]) -> None:
        """Write hyper-parameters of this run. `SummaryWriter.add_hparams` would write them as a separate run."""
        from torch.utils.tensorboard.summary import hparams

        file: Any = self._writer.file_writer
        for summary in hparams(settings, dict.fromkeys(metrics, 0.0)):
            file.add_summary(summary)


def _timed(figures: StepFigures) -> dict[str, float | None]:
    """Return the scalars of a step that depend on how long things took."""
    scalars = {"bubble": figures.bubble, "time/step": figures.seconds, "time/iteration": figures.iteration}
    for name, count in (("samples", figures.samples), ("tokens", figures.tokens)):
        if count is not None and figures.iteration > 0:
            scalars[f"throughput/{name}_per_second"] = count / figures.iteration
    for rank, parts in enumerate(figures.ranks):
        scalars |= {f"rank_{rank:02}/time/{part}": seconds for part, seconds in parts.items()}
    return scalars


def _settings(pipe: Pipeline, processes: int) -> dict[str, str | float]:
    """Return the settings on which a run's figures depend."""
    schedule = pipe.schedule
    return {
        "model": pipe.package.manifest.model.class_name or "model",
        "package": pipe.package.path.name,
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "processes": processes,
        "mesh": " × ".join(f"{name} {length}" for name, length in zip(pipe.grid.names, pipe.grid.shape, strict=True)),
        "kernels": pipe.kernels,
        "recompute": pipe.recompute,
        "device": pipe.device.type,
    }


def _plan(package: Package, schedule: Schedule) -> str:
    """The package and its plan as Markdown."""
    manifest = package.manifest
    parts = [
        f"## {markdown(package_title(manifest))}",
        markdown(schedule_title(schedule)),
        markdown_table(*short_stage_table(manifest, schedule.placement)),
        markdown_table(*short_boundary_table(manifest)),
        "\n".join(f"- {markdown(line)}" for line in explain_cuts(manifest.prediction)),
    ]
    return "\n\n".join(filter(None, parts))
