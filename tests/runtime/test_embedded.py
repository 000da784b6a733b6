"""A pipeline in one process: every number as plain autograd has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from pipegraph.errors import PipegraphError, RuntimeFault
from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from tests.messages import refused
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
    """torch.distributed.pipelining infers shapes again, with a forward of every stage, at each second switch."""
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
    calls = []

    def loss_fn(output: dict[str, Tensor], target: dict[str, tuple[Tensor, str]]) -> Tensor:
        calls.append((sorted(output), target["labels"][0].tolist(), target["labels"][1], target["scale"].item()))
        return output["logits"].mean() * target["scale"]

    pipe = pipeline(write(skips(), tmp_path / "skips"), microbatches=2, loss_fn=loss_fn)
    inputs = batch(pipe.package.manifest, 2)
    target = {"labels": [torch.arange(4), "mean"], "scale": torch.tensor(2.0)}
    result = pipe.step(inputs["tokens"], weights=inputs["weights"], target=target, return_outputs=True)
    assert calls == [(["hidden", "logits"], [0, 1], "mean", 2.0), (["hidden", "logits"], [2, 3], "mean", 2.0)]
    assert result.losses is None
    hidden, none_output = result.outputs["hidden"]
    assert hidden.shape == (4, 5, 8)
    assert none_output is None


def test_a_forward_schedule_steps_without_gradients(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), schedule="forward", microbatches=2)
    (x,) = batch(pipe.package.manifest, 2).values()
    result = pipe.step(x, return_outputs=True)
    assert result.loss is None
    assert_close(result.outputs, pipe.eval(x))
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_the_grad_mode_of_the_caller_does_not_matter(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss)
    with torch.no_grad():
        pipe.step(torch.ones(2, 8), target=torch.zeros(2))
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def read_a_value(_: object, inputs: tuple[Tensor, ...]) -> None:
    """A hook that no graph can hold."""
    inputs[0].sum().item()


def test_a_stage_that_is_left_to_autograd_is_an_error_if_strict(tmp_path: Path) -> None:
    package = Package.open(write(chain(2), tmp_path / "chain"))
    (x,) = batch(package.manifest, 2).values()
    with refused(PipegraphError, 'kernels="autograd"', "strict=True", advice="one of the two"):
        pipeline(package, microbatches=2, loss_fn=loss, strict=True)
    pipe = pipeline(package, "1f1b", "eager", microbatches=2, loss_fn=loss, strict=True)
    pipe.step(x, target=torch.zeros(4))
    pipe.stages[1].register_forward_pre_hook(read_a_value)
    for _ in range(2):
        with refused(RuntimeFault, "in stage 1,", "Stage1", "test_embedded.py:", advice="strict"):
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
        "Stage1 (stage 1): 0 static, 0 symbolic, 1 left to autograd (a number is taken out of a tensor, "
    )
    assert "inputs[0].sum().item()" in second


def test_a_pipeline_that_is_made_in_inference_mode_trains(tmp_path: Path) -> None:
    with torch.inference_mode():
        pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss)
    pipe.step(torch.ones(2, 8), target=torch.zeros(2))
    assert all(parameter.grad is not None for parameter in pipe.parameters())


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
    contiguity = []
    pipe.stages[1].register_forward_pre_hook(lambda module, args: contiguity.append(args[0].is_contiguous()))
    pipe.step(torch.ones(2, 8), target=torch.zeros(2))
    assert contiguity == [True]
