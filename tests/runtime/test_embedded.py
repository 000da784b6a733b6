"""A pipeline in one process: every number as plain autograd has it."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.errors import ArgumentError, PipegraphError, RuntimeFault, ScheduleError
from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.schedule import Action, Schedule
from tests.runtime.packages import Reference, batch, loss, write
from tests.runtime.parity import assert_parity
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import PARITY, chain, normed, skips


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", PARITY)
def test_parity_with_the_unsplit_model(name: str, schedule: str, microbatches: int, tmp_path: Path) -> None:
    assert_parity(write(PARITY[name](), tmp_path / name), schedule, microbatches)


@pytest.mark.parametrize("name", ["skips", "tied"])
def test_gradients_accumulate_over_steps(name: str, tmp_path: Path) -> None:
    """torch.distributed.pipelining divides what earlier steps left in `.grad`."""
    assert_parity(write(PARITY[name](), tmp_path / name), "1f1b", accumulate=3)


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,3F0,3B0,0B0,3F1,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n",  # a V: stages 1 and 2 are neighbours
        "0F0,0F1,3F0,3I0,0I0,3F1,3I1,0I1,3W0,3W1,0W0,0W1\n1F0,2F0,1F1,2F1,2I0,1I0,1W0,2I1,1I1,2W1,1W1,2W0\n",
    ],
    ids=["several stages on a rank", "I and W apart"],
)
def test_any_schedule_from_a_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(text)
    assert_parity(write(skips(), tmp_path / "skips"), str(tmp_path / "mine.csv"), microbatches=2)


def test_batch_norm_sees_the_microbatches_in_order(tmp_path: Path) -> None:
    pipe = pipeline(write(normed(), tmp_path / "normed"), microbatches=3, loss_fn=loss)
    plain = pipe.package.load_stage(0)
    (x,) = batch(pipe.package.manifest, 3).values()
    pipe.step(x, target=torch.zeros(12))
    for part in x.chunk(3):
        plain(part)
    for name, buffer in plain.named_buffers():
        assert_close(pipe.stages[0].get_buffer(name), buffer)
    assert pipe.state_dict()["norm.num_batches_tracked"] == 3


def test_eval_mode_is_the_users_and_reaches_dropout(tmp_path: Path) -> None:
    pipe = pipeline(write(normed(), tmp_path / "normed"), microbatches=2, loss_fn=loss)
    (x,) = batch(pipe.package.manifest, 2).values()
    assert (pipe.eval(x) == 0).any()  # dropout is on: eval() does not change the mode
    assert all(stage.training for stage in pipe.stages.values())
    for stage in pipe.stages.values():
        stage.eval()
    reference = Reference(pipe.package)
    for index, stage in enumerate(reference.stages):
        stage.load_state_dict(pipe.stages[index].state_dict())
        stage.eval()
    assert_close(pipe.eval(x), reference({"x": x}).detach())
    assert not pipe.eval(x).requires_grad
    pipe.stages[1].train()
    assert (pipe.eval(x) == 0).any()


def test_what_changes_between_steps_reaches_the_kernels_after_retrace(tmp_path: Path) -> None:
    factor = 1.0
    pipe = Pipeline(
        write(normed(), tmp_path / "normed"),
        microbatches=2,
        loss_fn=lambda output, target: factor * output.mean(),
        kernels="eager",
    )
    (x,) = batch(pipe.package.manifest, 2).values()
    for part in (part for stage in pipe.stages.values() for part in stage.modules()):
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    first = pipe.step(x).loss
    factor = 2.0
    assert_close(pipe.step(x).loss, first)
    pipe.retrace()
    assert_close(pipe.step(x).loss, 2 * first)
    for part in (part for stage in pipe.stages.values() for part in stage.modules()):
        if isinstance(part, torch.nn.Dropout):
            part.p = 1.0
    pipe.retrace()
    assert not pipe.eval(x).any()


def test_switching_between_step_and_eval_runs_no_stage_more_often(tmp_path: Path) -> None:
    """torch.distributed.pipelining infers shapes anew, with a forward of every stage, at each second switch."""
    pipe = pipeline(write(chain(3), tmp_path / "chain"), microbatches=4, loss_fn=loss)
    calls = []
    for index, stage in pipe.stages.items():
        stage.register_forward_hook(lambda *_, index=index: calls.append(index))
    (x,) = batch(pipe.package.manifest, 4).values()
    for _ in range(3):
        pipe.step(x, target=torch.zeros(8))
        pipe.evaluate(x)
        pipe.evaluate(x)
    assert [calls.count(index) for index in range(3)] == [3 * 3 * 4] * 3


def test_a_step_takes_a_target_of_any_structure_and_returns_the_models(tmp_path: Path) -> None:
    seen = []

    def loss_fn(output: dict[str, Tensor], target: dict[str, tuple[Tensor, str]]) -> Tensor:
        seen.append((sorted(output), target["labels"][0].tolist(), target["labels"][1], target["scale"].item()))
        return output["logits"].mean() * target["scale"]

    pipe = pipeline(write(skips(), tmp_path / "skips"), microbatches=2, loss_fn=loss_fn)
    inputs = batch(pipe.package.manifest, 2)
    target = {"labels": [torch.arange(4), "mean"], "scale": torch.tensor(2.0)}
    result = pipe.step(inputs["tokens"], weights=inputs["weights"], target=target, return_outputs=True)
    assert seen == [(["hidden", "logits"], [0, 1], "mean", 2.0), (["hidden", "logits"], [2, 3], "mean", 2.0)]
    assert result.losses is None
    hidden, nothing = result.outputs["hidden"]
    assert hidden.shape == (4, 5, 8)
    assert nothing is None


def test_a_forward_schedule_steps_without_gradients(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), schedule="forward", microbatches=2)
    (x,) = batch(pipe.package.manifest, 2).values()
    result = pipe.step(x, return_outputs=True)
    assert result.loss is None
    assert_close(result.outputs, pipe.eval(x))
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_backward_needs_a_loss(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=2)
    with pytest.raises(PipegraphError, match=r"1f1b has a backward, which needs a loss.\nTry: Pipeline"):
        pipe.step(torch.zeros(4, 8))


def test_the_grad_mode_of_the_caller_does_not_matter(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss)
    with torch.no_grad():
        pipe.step(torch.ones(2, 8), target=torch.zeros(2))
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_inference_mode_would_train_nothing(tmp_path: Path) -> None:
    """Every gradient would stay as it was, without an error."""
    pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss)
    x, target = torch.ones(2, 8), torch.zeros(2)
    with torch.inference_mode(), pytest.raises(PipegraphError, match=r"inference_mode.*\nTry: .*evaluate\(\)"):
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
    assert fault.startswith("rank 1 failed in stage 1, action 1F2, microbatch 2: ValueError: broken on purpose (at ")
    assert fault.endswith('raise ValueError("broken on purpose"))')
    assert row.endswith("1F2  <-- ERROR HERE")
    assert isinstance(raised.value.__cause__, ValueError)
    expected = pipeline(pipe.package, schedule="gpipe", microbatches=4, loss_fn=loss).step(x, target=torch.zeros(8))
    assert torch.equal(pipe.step(x, target=torch.zeros(8)).loss, expected.loss)


@pytest.mark.parametrize("method", ["begin", "prepare"])
def test_a_stage_that_fails_before_its_first_action_is_named(method: str, tmp_path: Path) -> None:
    pipe = pipeline(write(chain(3), tmp_path / "chain"), schedule="gpipe", microbatches=2, loss_fn=loss)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("broken on purpose")

    setattr(pipe._runner.kernels[1], method, fail)
    (x,) = batch(pipe.package.manifest, 2).values()
    expected = r"^rank 1 failed in stage 1, before action 1F0, microbatch 0: ValueError: broken on purpose"
    with pytest.raises(RuntimeFault, match=expected):
        pipe.step(x, target=torch.zeros(4))


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), True, "8"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^timeout cannot be .*: give the seconds that a rank waits"):
        pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss, timeout=timeout)


def read_a_value(_: object, inputs: tuple[Tensor, ...]) -> None:
    """A hook that no graph can hold."""
    inputs[0].sum().item()


def test_a_stage_that_is_left_to_autograd_is_an_error_if_strict(tmp_path: Path) -> None:
    package = Package.open(write(chain(2), tmp_path / "chain"))
    (x,) = batch(package.manifest, 2).values()
    with pytest.raises(PipegraphError, match="leaves every stage to autograd, which strict=True refuses"):
        pipeline(package, microbatches=2, loss_fn=loss, strict=True)
    pipe = pipeline(package, "1f1b", "eager", microbatches=2, loss_fn=loss, strict=True)
    pipe.step(x, target=torch.zeros(4))
    pipe.stages[1].register_forward_pre_hook(read_a_value)
    for _ in range(2):
        with pytest.raises(RuntimeFault, match=r"in stage 1, .*: PipegraphError: Stage1 cannot be traced"):
            pipe.step(x, target=torch.zeros(4))


def test_the_report_says_why_a_stage_is_left_to_autograd(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), "1f1b", "eager", microbatches=2, loss_fn=loss)
    pipe.stages[1].register_forward_pre_hook(read_a_value)
    (x,) = batch(pipe.package.manifest, 2).values()
    with pytest.warns(UserWarning, match="Stage1 cannot be traced"):
        pipe.step(x, target=torch.zeros(4))
    first, second = map(str, pipe.kernels_report())
    assert first == "Stage0 (stage 0): 1 static, 0 symbolic"
    assert second.startswith(
        "Stage1 (stage 1): 0 static, 0 symbolic, 1 left to autograd (DataDependentOutputException: "
    )


def test_two_threads_in_one_pipeline_are_refused(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=2, loss_fn=loss)
    (x,) = batch(pipe.package.manifest, 2).values()
    refused: list[str] = []

    def step() -> None:
        try:
            pipe.step(x, target=torch.zeros(4))
        except PipegraphError as error:
            refused.append(str(error))

    def step_elsewhere(*_: object) -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(10)

    hook = pipe.stages[1].register_forward_pre_hook(step_elsewhere)
    pipe.step(x, target=torch.zeros(4))
    hook.remove()
    assert len(refused) == 2
    assert refused[0].startswith("this pipeline is in another call already, of another thread")
    pipe.step(x, target=torch.zeros(4))


@pytest.mark.parametrize(
    ("options", "dimension"),
    [({"tp_plan": {"layer0": "colwise"}}, "tp"), ({"fsdp": {"reshard_after_forward": True}}, "dp_shard")],
)
def test_what_divides_stages_needs_ranks_that_share_them(
    options: dict[str, Any], dimension: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=rf'for ranks along "{dimension}".*\nTry: mesh='):
        pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss, **options)


def test_a_pipeline_is_not_copied(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PipegraphError, match=r"cannot be copied or pickled: .*\nTry: state_dict\(\)"):
            copied(pipe)


def test_a_pipeline_that_is_made_in_inference_mode_trains(tmp_path: Path) -> None:
    with torch.inference_mode():
        pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss)
    pipe.step(torch.ones(2, 8), target=torch.zeros(2))
    assert all(each.grad is not None for each in pipe.parameters())


def test_a_loss_without_a_graph_is_refused(tmp_path: Path) -> None:
    def detached(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.detach(), target)

    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=2, loss_fn=detached)
    (x,) = batch(pipe.package.manifest, 2).values()
    with pytest.raises(RuntimeFault, match="loss_fn returned a tensor without a gradient"):
        pipe.step(x, target=torch.zeros(4))


def test_an_edited_stage_that_breaks_its_boundary_is_named(tmp_path: Path) -> None:
    folder = write(chain(2), tmp_path / "chain")
    source = folder / "stage_0.py"
    source.write_text(source.read_text().replace("torch.tanh(", "torch.tanh(1 + ").replace("(x))", "(x))[:, :3]"))
    pipe = pipeline(folder, loss_fn=loss)
    with pytest.raises(
        RuntimeFault, match=r"returned h0 as float32\[2, 3\]; pipeline.json promises h0 float32\[2, 8\]"
    ):
        pipe.step(torch.ones(2, 8), target=torch.zeros(2))


def test_an_edited_stage_that_returns_nothing_is_named(tmp_path: Path) -> None:
    folder = write(chain(2), tmp_path / "chain")
    source = folder / "stage_0.py"
    source.write_text(source.read_text().replace("return ", "_ = "))
    with pytest.raises(RuntimeFault, match=r"stage 0, .* returned a NoneType for h0, which goes to stage 1.\nTry: "):
        pipeline(folder, loss_fn=loss).step(torch.ones(2, 8), target=torch.zeros(2))


def test_the_class_of_a_loss_is_no_loss(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"this is the class MSELoss.\nTry: loss_fn="):
        pipeline(write(chain(2), tmp_path / "chain"), loss_fn=nn.MSELoss)


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=lambda output, target: output)
    with pytest.raises(RuntimeFault, match=r"loss_fn\(output, target\) returned a tensor of shape \[2, 8\]"):
        pipe.step(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("1f2b", 'Did you mean "1f1b"'),
        ("absent.csv", "the schedule absent.csv cannot be read"),
        (Schedule("mine", (0,), 1, ((Action.parse("0F0"),),)), "mine is for 1 stage, and there are 2"),
        (
            Schedule("two", (0, 1), 2, tuple((Action(i, "F", 0), Action(i, "F", 1)) for i in (0, 1))),
            "has 2 microbatches",
        ),
    ],
    ids=["name", "file", "stages", "microbatches"],
)
def test_a_schedule_that_does_not_fit_is_refused(schedule: str | Schedule, message: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=message):
        pipeline(write(chain(2), tmp_path / "chain"), schedule=schedule, microbatches=1, loss_fn=loss)


def test_unknown_kernels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PipegraphError, match=r'No kernels are called "autograb". Did you mean "autograd"'):
        pipeline(write(chain(2), tmp_path / "chain"), kernels="autograb")


@pytest.mark.parametrize("kernels", ["autograd", "eager"])
def test_a_step_under_autocast_equals_the_unsplit_model(kernels: str, tmp_path: Path) -> None:
    """Boundaries keep the dtypes of the manifest, and gradients go back in those that autocast has chosen."""
    sketch = chain(3)
    bare = tuple(replace(stage, forward=stage.forward.replace("torch.tanh", "")) for stage in sketch.stages)
    pipe = Pipeline(
        write(replace(sketch, stages=bare), tmp_path / "chain"), microbatches=2, loss_fn=loss, kernels=kernels
    )
    reference = Reference(pipe.package)
    inputs, target = batch(pipe.package.manifest, 2), torch.zeros(4)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(*inputs.values(), target=target)
        expected = loss(reference(inputs), target)
    expected.backward()
    for name, parameter in pipe.named_parameters():
        assert_close(parameter.grad, reference.parameters[name].grad, rtol=0.02, atol=0.002)


def test_what_a_stage_hands_over_is_contiguous(tmp_path: Path) -> None:
    """As it is between processes: kernels that are compiled for one layout would be compiled again for the other."""
    sketch = chain(2)
    first = replace(sketch.stages[0], forward="return self.layer0(x).t().contiguous().t()")
    sketch = replace(sketch, stages=(first, sketch.stages[1]))
    pipe = Pipeline(write(sketch, tmp_path / "chain"), loss_fn=loss, kernels="autograd")
    seen = []
    pipe.stages[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].is_contiguous()))
    pipe.step(torch.ones(2, 8), target=torch.zeros(2))
    assert seen == [True]
