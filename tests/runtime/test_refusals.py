"""What a `Pipeline` in one process refuses, and who is named if a stage fails."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegraph.errors import ArgumentError, PipegraphError, RuntimeFault, ScheduleError
from pipegraph.schedule import Action, Schedule
from tests.messages import refused
from tests.runtime.packages import batch, loss, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain


def test_a_backward_needs_a_loss(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=2)
    with refused(PipegraphError, "1f1b", "loss", advice="Pipeline(…, loss_fn=…)"):
        pipe.step(torch.zeros(4, 8))


def test_inference_mode_would_train_nothing(tmp_path: Path) -> None:
    """Every gradient would stay as it was, without an error."""
    pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss)
    x, target = torch.ones(2, 8), torch.zeros(2)
    with torch.inference_mode(), refused(PipegraphError, "torch.inference_mode()", advice="evaluate()"):
        pipe.step(x, target=target)
    pipe.step(x, target=target)
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_a_stage_that_fails_is_named_and_the_next_step_is_whole(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(3), tmp_path / "chain"), schedule="gpipe", microbatches=4, loss_fn=loss)
    calls = []

    def break_down(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("broken on purpose")

    pipe.stages[1].register_forward_pre_hook(break_down)
    (x,) = batch(pipe.package.manifest, 4).values()
    with pytest.raises(RuntimeFault) as raised:
        pipe.step(x, target=torch.zeros(8))
    fault, row = str(raised.value).splitlines()
    assert fault.startswith("rank 1 failed in stage 1, action 1F2, microbatch 2: ValueError: broken on purpose")
    assert 'raise ValueError("broken on purpose")' in fault
    assert row.endswith("1F2  <-- ERROR HERE")
    assert isinstance(raised.value.__cause__, ValueError)
    expected = pipeline(pipe.package, schedule="gpipe", microbatches=4, loss_fn=loss).step(x, target=torch.zeros(8))
    assert torch.equal(pipe.step(x, target=torch.zeros(8)).loss, expected.loss)


def test_a_step_is_whole_after_one_that_failed_in_any_action(tmp_path: Path) -> None:
    """The place at which a step failed is not one at which the next step waits: that would be taken for a deadlock."""
    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=4, loss_fn=loss)
    (x,) = batch(pipe.package.manifest, 4).values()
    expected = pipe.step(x, target=torch.zeros(8)).loss
    actions = [(rank, place) for rank, row in enumerate(pipe.schedule.actions) for place in range(len(row))]
    for rank, place in actions:

        class Failing:
            def begin(self, at: int, action: Action, failing: Any = pipe.schedule.actions[rank][place]) -> None:
                if action == failing:
                    raise ValueError("on purpose")

            def end(self, *_: object) -> None:
                pass

        with pipe.observe(Failing()), refused(RuntimeFault, "on purpose", "ERROR HERE"):
            pipe.step(x, target=torch.zeros(8))
        assert torch.equal(pipe.step(x, target=torch.zeros(8)).loss, expected)


@pytest.mark.parametrize("method", ["begin", "prepare"])
def test_a_stage_that_fails_before_its_first_action_is_named(method: str, tmp_path: Path) -> None:
    pipe = pipeline(write(chain(3), tmp_path / "chain"), schedule="gpipe", microbatches=2, loss_fn=loss)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("broken on purpose")

    setattr(pipe._runner.kernels[1], method, fail)
    (x,) = batch(pipe.package.manifest, 2).values()
    with refused(RuntimeFault, "rank 1 failed in stage 1", "before action 1F0, microbatch 0", "ValueError: broken"):
        pipe.step(x, target=torch.zeros(4))


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), True, "8"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any, tmp_path: Path) -> None:
    with refused(ArgumentError, f"timeout cannot be {timeout!r}", "seconds", advice="timeout=1800"):
        pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss, timeout=timeout)


def test_two_threads_in_one_pipeline_are_refused(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=2, loss_fn=loss)
    (x,) = batch(pipe.package.manifest, 2).values()
    messages: list[str] = []

    def step() -> None:
        try:
            pipe.step(x, target=torch.zeros(4))
        except PipegraphError as error:
            messages.append(str(error))

    def step_elsewhere(*_: object) -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(10)

    hook = pipe.stages[1].register_forward_pre_hook(step_elsewhere)
    pipe.step(x, target=torch.zeros(4))
    hook.remove()
    assert len(messages) == 2
    assert all("another thread" in message for message in messages)
    pipe.step(x, target=torch.zeros(4))


@pytest.mark.parametrize(
    ("options", "dimension"),
    [({"tp_plan": {"layer0": "colwise"}}, "tp"), ({"fsdp": {"reshard_after_forward": True}}, "dp_shard")],
)
def test_what_divides_stages_needs_ranks_that_share_them(
    options: dict[str, Any], dimension: str, tmp_path: Path
) -> None:
    with refused(ArgumentError, next(iter(options)), f'"{dimension}"', advice=f'mesh_dim_names=("pp", "{dimension}")'):
        pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss, **options)


def test_a_pipeline_is_not_copied(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with refused(PipegraphError, "copied or pickled", advice="state_dict()"):
            copied(pipe)


def test_a_loss_without_a_graph_is_refused(tmp_path: Path) -> None:
    def detached(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.detach(), target)

    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=2, loss_fn=detached)
    (x,) = batch(pipe.package.manifest, 2).values()
    with refused(RuntimeFault, "stage 1, action 1F0", "loss_fn", "without a gradient", advice="without detach()"):
        pipe.step(x, target=torch.zeros(4))


def test_an_edited_stage_that_breaks_its_boundary_is_named(tmp_path: Path) -> None:
    folder = write(chain(2), tmp_path / "chain")
    source = folder / "stage_0.py"
    source.write_text(source.read_text().replace("torch.tanh(", "torch.tanh(1 + ").replace("(x))", "(x))[:, :3]"))
    pipe = pipeline(folder, loss_fn=loss)
    with refused(RuntimeFault, "h0 as float32[2, 3]", "pipeline.json", "h0 float32[2, 8]", advice="pipeline.json"):
        pipe.step(torch.ones(2, 8), target=torch.zeros(2))


def test_an_edited_stage_that_returns_nothing_is_named(tmp_path: Path) -> None:
    folder = write(chain(2), tmp_path / "chain")
    source = folder / "stage_0.py"
    source.write_text(source.read_text().replace("return ", "_ = "))
    with refused(
        RuntimeFault, "stage 0, ", "NoneType for h0", "stage 1", "rank 0: 0F0  <-- ERROR HERE", advice="forward"
    ):
        pipeline(folder, loss_fn=loss).step(torch.ones(2, 8), target=torch.zeros(2))


def test_the_class_of_a_loss_is_no_loss(tmp_path: Path) -> None:
    with refused(ArgumentError, "loss_fn", "the class MSELoss", advice="loss_fn=nn.MSELoss()"):
        pipeline(write(chain(2), tmp_path / "chain"), loss_fn=nn.MSELoss)


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=lambda output, target: output)
    with refused(RuntimeFault, "loss_fn(output, target)", "shape [2, 8]", advice="mean"):
        pipe.step(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("schedule", "parts", "advice"),
    [
        ("1f2b", ['"1f2b"', '"1f1b"'], "1f1b"),
        ("absent.csv", ["absent.csv", "No such file"], "the name of a file"),
        (Schedule("mine", (0,), 1, ((Action.parse("0F0"),),)), ["mine", "1 stage", "2"], "a schedule for 2"),
        (
            Schedule("two", (0, 1), 2, tuple((Action(i, "F", 0), Action(i, "F", 1)) for i in (0, 1))),
            ["two has 2 microbatches", "microbatches=1"],
            "leave it out",
        ),
    ],
    ids=["name", "file", "stages", "microbatches"],
)
def test_a_schedule_that_does_not_fit_is_refused(
    schedule: str | Schedule, parts: list[str], advice: str, tmp_path: Path
) -> None:
    with refused(ScheduleError, *parts, advice=advice):
        pipeline(write(chain(2), tmp_path / "chain"), schedule=schedule, microbatches=1, loss_fn=loss)


def test_unknown_kernels_are_refused(tmp_path: Path) -> None:
    with refused(PipegraphError, '"autograb"', '"autograd"', advice='kernels="autograd"'):
        pipeline(write(chain(2), tmp_path / "chain"), kernels="autograb")
