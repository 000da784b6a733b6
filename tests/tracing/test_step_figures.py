"""Figures of steps, of all ranks: what they add up to, and what is kept out of them."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from pipegraph.package import Manifest, Package, Value
from pipegraph.package.sizes import Size
from pipegraph.runtime.batch import StepSizes
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.schedule import build
from pipegraph.tracing.recording.step_figures import StepRecorder, batch_sizes, model_flops, parts_of
from tests.runtime.packages import write
from tests.runtime.sketches import chain

NAP = 0.05


def recorded(
    folder: Path, schedule: str = "1f1b", ranks: int = 2, microbatches: int = 2
) -> tuple[Pipeline, torch.Tensor]:
    order = build(schedule, ranks, microbatches)
    package = Package.open(write(chain(order.stages, width=8), folder / "chain"))
    pipe = Pipeline(package, order, loss_fn=lambda output, target: output.square().mean(), kernels="eager")
    (value,) = (candidate for candidate in package.manifest.at_capture().values.values() if candidate.producer < 0)
    return pipe, torch.randn(microbatches * value.shape[0], *value.shape[1:])


def test_a_step_and_its_parts(tmp_path: Path) -> None:
    pipe, batch = recorded(tmp_path)
    recorder = StepRecorder(pipe)
    pipe.observe(recorder.times, evals=False)
    pipe.stages[0].register_forward_pre_hook(lambda *_: time.sleep(NAP))
    figures = []
    for _ in range(2):
        loss = pipe.step(batch).loss
        time.sleep(NAP)  # the optimizer
        figures.append(recorder.end_step(loss))
        recorder.begin_step()
        assert figures[-1].loss == pytest.approx(float(loss))
    last = figures[-1]
    assert (last.samples, last.tokens) == (len(batch), None)
    assert [step.index for step in figures] == [0, 1]
    assert [list(parts) for parts in last.ranks] == [["forward", "backward", "transfer", "wait"]] * 2
    spent = sum(sum(parts.values()) for parts in last.ranks)
    assert 0 < spent <= last.seconds < last.iteration - NAP
    assert last.bubble is None  # both ranks in this process, in turn
    assert last.peak_bytes[0] > 2**20


def test_parts_show_the_slow_rank(tmp_path: Path) -> None:
    pipe, batch = recorded(tmp_path, "zb-h1")
    kernels = pipe._runner.executors.training_executors[1]._kernels[1]
    weight_backward = kernels.weight_backward
    kernels.weight_backward = lambda saved: (time.sleep(NAP), weight_backward(saved))[1]  # type: ignore[method-assign]
    recorder = StepRecorder(pipe)
    pipe.observe(recorder.times, evals=False)
    pipe.step(batch)
    recorder.end_step(None)
    recorder.begin_step()
    pipe.step(batch)
    figures = recorder.end_step(None)
    assert figures.loss is None
    assert figures.ranks[1]["weight_gradient"] >= 2 * NAP > 5 * figures.ranks[0]["weight_gradient"]


def kinds_of(recorder: StepRecorder) -> dict[int, list[str]]:
    """The kinds of each rank's actions in the last step."""
    return {rank: [span.action.kind.value for span in spans] for rank, spans in recorder._last.spans.items()}


def test_an_eval_between_steps_counts_for_nothing(tmp_path: Path) -> None:
    pipe, batch = recorded(tmp_path)
    recorder = StepRecorder(pipe)
    pipe.observe(recorder.times, evals=False)
    pipe.step(batch)
    pipe.evaluate(batch)
    recorder.end_step(None)
    alone = kinds_of(recorder)
    recorder.begin_step()
    pipe.evaluate(batch)
    pipe.step(batch)
    recorder.end_step(None)
    assert kinds_of(recorder) == alone
    assert alone[0] == ["F", "SEND_F", "F", "SEND_F", "RECV_B", "B", "RECV_B", "B"]


def test_the_timeline_of_the_last_step(tmp_path: Path) -> None:
    pipe, batch = recorded(tmp_path, "zb-v", microbatches=4)
    recorder = StepRecorder(pipe)
    pipe.observe(recorder.times, evals=False)
    assert recorder.timeline() is None
    pipe.step(batch)
    figures = recorder.end_step(None)
    timeline = recorder.timeline()
    assert timeline is not None
    assert [[event.action for event in row] for row in timeline.events] == [list(row) for row in pipe.schedule.actions]
    assert min(row[0].start for row in timeline.events) == 0
    assert timeline.makespan == pytest.approx(figures.seconds, abs=1e-3)
    for row in timeline.events:
        assert all(event.start <= event.end for event in row)
        assert all(first.end <= second.start for first, second in pairwise(row))


def test_a_call_of_other_microbatches_has_no_timeline(tmp_path: Path) -> None:
    package, batch = recorded(tmp_path, "zb-v", microbatches=4)[0].package, torch.randn(8, 8)
    pipe = Pipeline(package, "zb-v", 3, loss_fn=lambda output, target: output.square().mean(), kernels="autograd")
    recorder = StepRecorder(pipe)
    pipe.observe(recorder.times, evals=False)
    pipe.step(batch, microbatches=4)
    recorder.end_step(None)
    assert recorder.timeline() is None


def test_parts_of_a_schedule() -> None:
    assert parts_of(build("zb-h1", 2, 4)) == ("forward", "input_gradient", "weight_gradient", "transfer", "wait")
    assert parts_of(build("gpipe", 1, 4)) == ("forward", "backward")
    assert parts_of(build("forward", 2, 4)) == ("forward", "transfer", "wait")


@pytest.mark.parametrize(
    ("dtype", "shape", "sizes"),
    [
        ("int64", (2, 16), (8, 128)),
        ("uint8", (2, 16), (8, 128)),
        ("float32", (2, 16), (8, None)),
        ("int64", (2, 3, 16), (8, None)),
        ("float32", (), (None, None)),
    ],
)
def test_samples_and_tokens(tmp_path: Path, dtype: str, shape: tuple[int, ...], sizes: tuple[int | None, ...]) -> None:
    manifest = Package.open(write(chain(2, width=8), tmp_path / "chain")).manifest
    (name,) = (candidate.name for candidate in manifest.values.values() if candidate.producer < 0)
    value = replace(manifest.values[name], dtype=dtype, shape=shape, batch_dim=0 if shape else None)
    assert batch_sizes(_with(manifest, value), StepSizes.even({}, 4)) == sizes


def _with(manifest: Manifest, value: Value) -> Manifest:
    return replace(manifest, values={**manifest.values, value.name: value})


def test_samples_and_tokens_are_those_of_the_batch_at_hand(tmp_path: Path) -> None:
    manifest = Package.open(write(chain(2, width=8), tmp_path / "chain")).manifest
    (name,) = (candidate.name for candidate in manifest.values.values() if candidate.producer < 0)
    value = replace(manifest.values[name], dtype="int64", shape=("batch", "tokens_1"))
    sizes = {"batch": Size(captured=2), "tokens_1": Size(captured=8)}
    varying = replace(manifest, values={**manifest.values, name: value}, sizes=sizes)
    assert batch_sizes(varying, StepSizes.even({"batch": 10, "tokens_1": 7}, 4)) == (10, 70)


def test_the_operations_of_the_model_grow_with_its_batch(tmp_path: Path) -> None:
    pipe, batch = recorded(tmp_path)
    manifest = pipe.package.manifest
    stages = [replace(stage, cost=replace(stage.cost, flops=1000 * (stage.index + 1))) for stage in manifest.stages]
    priced = replace(manifest, stages=tuple(stages))
    pipe.step(batch)
    assert pipe.last_sizes is not None
    assert model_flops(priced, pipe.last_sizes) == 3 * (1000 + 2000) * 2  # microbatches, as they were captured
    more = StepSizes(pipe.last_sizes.microbatches[:1] * 5)
    assert model_flops(priced, more) == 3 * (1000 + 2000) * 5
    unknown = replace(manifest, stages=tuple(replace(stage, cost=replace(stage.cost, flops=None)) for stage in stages))
    assert model_flops(unknown, pipe.last_sizes) is None
