"""The memory of received messages is reused when, and only when, nothing reads it any more.

Released memory is overwritten here (`PIPEGRAPH_VERIFY`), so that a value read from it is NaN. In one process messages
are then copied, as they are between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from pipegraph import Pipeline
from pipegraph.kernels import Forward, maker
from pipegraph.kernels.autograd import AutogradKernels
from pipegraph.runtime.executor import Executor
from pipegraph.runtime.parameters import share_memory
from pipegraph.runtime.step_state import ReceivedMessages
from pipegraph.runtime.transport.distributed import BufferPool
from pipegraph.schedule import What, lifetimes, lower, names
from pipegraph.schedule.recipes import trains
from tests.runtime import rank_functions, ranks
from tests.runtime.packages import Reference, Sketch, Stage, batch, loss, write
from tests.runtime.parity import arguments, assert_parity
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import PARITY, aliases, chain, skips
from tests.slow import LIKE_OTHERS, cases

TRAINING = [name for name in names() if trains(name)]


@pytest.fixture(autouse=True)
def _verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEGRAPH_VERIFY", "1")


def passing() -> Sketch:
    """Three stages that pass on what they receive, in microbatches of one row.

    The gradient of `a` is that of `bias0`, as it is; the gradients of both inputs of the last stage are one tensor; and
    the model returns an input of its last stage.
    """
    plain = ("float32", (1, 8), True)
    bias = "self.bias{0} = nn.Parameter(torch.ones({1}))"
    return Sketch(
        stages=(
            Stage("x", "a", bias.format(0, "1, 8"), "return x + self.bias0"),
            Stage("a", "a1, b", bias.format(1, "8"), "return a, a + self.bias1.view(1, 8)"),
            Stage("a1, b", "c, b", bias.format(2, "8"), "return (a1 + b) + self.bias2, b"),
        ),
        values={"x": ("float32", (1, 8), False), "a": plain, "a1": plain, "b": plain, "c": plain},
        outputs=["c", "b"],
    )


ALIASING = {"passing": passing, "aliases": aliases, "skips": skips}


@pytest.mark.parametrize(
    ("name", "kernels"), [*((name, "eager") for name in PARITY | ALIASING), *((name, "autograd") for name in ALIASING)]
)
def test_parity_with_the_unsplit_model(name: str, kernels: str, tmp_path: Path) -> None:
    folder = write((PARITY | ALIASING)[name](), tmp_path / name)
    assert_parity(folder, "1f1b", microbatches=5, accumulate=2, kernels=kernels)


@pytest.mark.parametrize("schedule", cases(TRAINING, slow=LIKE_OTHERS))
def test_parity_under_every_schedule(schedule: str, tmp_path: Path) -> None:
    """The layers of the chain save their inputs for the backward."""
    assert_parity(write(chain(4), tmp_path / "chain"), schedule, microbatches=4, kernels="eager")


def test_two_stages_do_not_add_to_one_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The gradients of `a + b` are one tensor, and autograd makes `.grad` a view of what it is given."""
    plain = ("float32", (1, 8), True)
    forked = Sketch(
        stages=(
            Stage("x", "a", "self.bias0 = nn.Parameter(torch.ones(8))", "return x + self.bias0.view(1, 8)"),
            Stage("y", "b", "self.bias1 = nn.Parameter(torch.ones(8))", "return y + self.bias1.view(1, 8)"),
            Stage("a, b", "c", "self.bias2 = nn.Parameter(torch.ones(8))", "return (a + b) * self.bias2"),
        ),
        values={"x": ("float32", (1, 8), False), "y": ("float32", (1, 8), False), "a": plain, "b": plain, "c": plain},
        outputs="c",
    )
    monkeypatch.delenv("PIPEGRAPH_VERIFY")  # which copies messages
    eager, autograd = maker("eager"), maker("autograd")

    def kernels(*args: Any) -> Any:
        return (autograd if args[-1] is None else eager)(*args)  # the last stage is given the loss

    assert_parity(write(forked, tmp_path / "forked"), "gpipe", accumulate=2, kernels=kernels)


def test_parity_between_processes(tmp_path: Path) -> None:
    folder = str(write(passing(), tmp_path / "passing"))
    cases = [(folder, name) for name in ("gpipe", "1f1b", "zb-h1")]
    assert ranks.run(rank_functions.parity, 3, cases, "eager") == ["equal"] * 3


@pytest.mark.parametrize("schedule", cases([*TRAINING, "forward"], slow=LIKE_OTHERS))
def test_a_message_is_released_at_the_end_of_its_last_read(
    schedule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe = pipeline(write(chain(4), tmp_path / "chain"), schedule, "eager", microbatches=4, loss_fn=loss)
    expected = {
        (rank, lifetime.stages[1], lifetime.microbatch, lifetime.last_read)
        for rank, row in enumerate(lifetimes(lower(pipe.schedule)))
        for lifetime in row
        if lifetime.what is (What.SAVED if pipe.schedule.trains else What.VALUES)
    }
    released: set[tuple[int, int, int, int]] = set()
    running: list[Executor] = []
    release = ReceivedMessages.release

    def watched(messages: ReceivedMessages) -> None:
        executor = running[-1]
        action = executor.actions[executor.position]
        assert messages._receives
        released.add((executor.rank, action.stage, action.microbatch, executor.position))
        release(messages)

    class Last:
        def begin(self, rank: int, action: object) -> None:
            running[:] = [pipe._runner.executors.training_executors[rank]]

        def end(self, *_: object) -> None:
            pass

    monkeypatch.setattr(ReceivedMessages, "release", watched)
    (x,) = batch(pipe.package.manifest, 4).values()
    with pipe.observe(Last()):
        pipe.step(x, target=torch.zeros(8))
    assert released
    assert released <= expected


def test_outputs_outlive_the_steps_that_come_after(tmp_path: Path) -> None:
    pipe = pipeline(write(passing(), tmp_path / "passing"), "1f1b", "eager", microbatches=2, loss_fn=loss)
    reference = Reference(pipe.package)
    output_pairs = []
    for seed in range(4):
        inputs = batch(pipe.package.manifest, 2, seed)
        args, kwargs = arguments(pipe.package, inputs)
        result = pipe.step(*args, target=torch.zeros(2), return_outputs=True, **kwargs)
        output_pairs.append((result.outputs, reference(inputs)))
        output_pairs.append((pipe.eval(*args, **kwargs), reference(inputs)))
    for output, expected in output_pairs:
        assert_close(output, expected)


def test_an_eval_in_inference_mode_leaves_steps_whole(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(3), tmp_path / "chain"), "1f1b", "eager", microbatches=2, loss_fn=loss)
    reference = Reference(pipe.package)
    inputs = batch(pipe.package.manifest, 2)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert_close(pipe.eval(*inputs.values()), reference(inputs).detach())
        pipe.step(*inputs.values(), target=torch.zeros(4))
        loss(reference(inputs), torch.zeros(4)).backward()
    for name, parameter in pipe.named_parameters():
        assert_close(parameter.grad, reference.parameters[name].grad)


def test_what_a_hook_keeps_is_not_overwritten(tmp_path: Path) -> None:
    """Python code of the stage runs with the kernels of autograd alone."""
    pipe = pipeline(write(chain(2), tmp_path / "chain"), "1f1b", microbatches=4, loss_fn=loss)
    hook_inputs: list[Tensor] = []
    pipe.stages[1].register_forward_pre_hook(lambda module, args: hook_inputs.append(args[0]))
    inputs = batch(pipe.package.manifest, 4)
    pipe.step(*inputs.values(), target=torch.zeros(8))
    assert_close(torch.cat(hook_inputs), pipe.stages[0](inputs["x"]))


class CarelessKernels(AutogradKernels):
    """They promise to keep nothing, and keep their inputs."""

    kept: list[Tensor]

    def forward(self, inputs: Sequence[Any], **options: Any) -> Forward:
        result = super().forward(inputs, **options)
        self.kept = [*getattr(self, "kept", []), inputs[0]]
        return Forward(result.outputs, result.loss, result.saved, is_pure=True)


def test_a_wrong_release_shows(tmp_path: Path) -> None:
    stage_kernels: list[CarelessKernels] = []

    def kernels(*args: Any) -> CarelessKernels:
        stage_kernels.append(CarelessKernels(*args))
        return stage_kernels[-1]

    pipe = Pipeline(write(chain(2), tmp_path / "chain"), microbatches=2, loss_fn=loss, kernels=kernels)
    (x,) = batch(pipe.package.manifest, 2).values()
    pipe.step(x, target=torch.zeros(4))
    assert not any(tensor.isnan().any() for tensor in stage_kernels[0].kept)  # the caller's
    assert all(tensor.isnan().all() for tensor in stage_kernels[1].kept)


def test_a_pool_has_as_many_buffers_as_were_held_at_once() -> None:
    pool, shapes = BufferPool([torch.float32], torch.device("cpu")), ((2, 8),)
    first, second = pool.take(shapes), pool.take(shapes)
    assert not share_memory(first, second)
    pool.release(first)
    assert pool.take(shapes) is first
    third = pool.take(shapes)
    assert not share_memory(third, (*first, *second))
    assert (third[0].shape, third[0].dtype) == ((2, 8), torch.float32)


def test_a_pool_drops_buffers_of_shapes_that_are_no_longer_used() -> None:
    pool = BufferPool([torch.float32], torch.device("cpu"))
    reused, dropped = pool.take(((2, 8),)), pool.take(((5, 8),))
    pool.drop_unused()
    pool.release(reused)
    pool.release(dropped)
    pool.drop_unused()  # nothing was taken
    assert pool.take(((2, 8),)) is reused
    pool.drop_unused()
    assert pool.take(((5, 8),)) is not dropped


def test_tensors_share_memory_with_their_views() -> None:
    memory = torch.zeros(4, 4)
    assert share_memory([None, "text", memory[1:, 2:]], [memory])
    assert share_memory([memory.view(16)], [torch.zeros(3), memory.t()])
    assert not share_memory([memory.clone(), None], [memory])
