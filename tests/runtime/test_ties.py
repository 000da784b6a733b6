"""Weights that three stages and more share: their gradients, in one order everywhere; checkpoints; meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from pipegraph.errors import RuntimeFault
from tests.messages import refused
from tests.runtime import checkpoint_models as models
from tests.runtime import checkpoint_ranks, meshes, ranks, tie_ranks
from tests.runtime.packages import Sketch, Stage, loss, write

SEED = 7
Saved = tuple[Path, list[float | None]]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in 1, 2 and 4 stages, of which all have one layer."""
    folder = tmp_path_factory.mktemp("packages")
    for stages in (1, 2, 4):
        write(models.perceptrons(stages, dropout=0.1, shared=True), folder / str(stages))
    return folder


@pytest.fixture(scope="module")
def saved(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of a run of 4 stages that was saved at step 5, and its losses after that."""
    folder = tmp_path_factory.mktemp("run")
    run = models.start(packages / "4", "zb-h1", seed=SEED)
    run.train(0, 5)
    run.save(folder, 5)
    return folder, run.train(5, 10)


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [("zb-v", {"pp": 2}), pytest.param("interleaved-1f1b", {"pp": 2}, marks=pytest.mark.slow), ("1f1b", {"pp": 4})],
)
def test_gradients_are_added_up_in_the_order_of_stages_whichever_ranks_have_them(
    packages: Path, schedule: str, shape: dict[str, int]
) -> None:
    """To the last digit; the second step adds to the gradients of the first."""
    expected = tie_ranks.gradients(0, str(packages / "4"), "1f1b", None, SEED)
    expected["head.weight"] = expected["embed.weight"]
    for gradients in ranks.run(tie_ranks.gradients, shape["pp"], str(packages / "4"), schedule, shape, SEED):
        assert "shared.weight" in gradients
        assert_close(gradients, {name: expected[name] for name in gradients}, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-1f1b"])
def test_a_rank_with_one_of_the_stages_and_a_rank_with_several(schedule: str, tmp_path: Path) -> None:
    package = write(models.perceptrons(4, shared=True, first_shared=1), tmp_path / "late")
    expected = tie_ranks.gradients(0, str(package), "1f1b", None, SEED)
    expected["head.weight"] = expected["embed.weight"]
    for gradients in ranks.run(tie_ranks.gradients, 2, str(package), schedule, {"pp": 2}, SEED):
        assert "shared.weight" in gradients
        assert_close(gradients, {name: expected[name] for name in gradients}, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["zb-v", "gpipe", pytest.param("interleaved-1f1b", marks=pytest.mark.slow)])
def test_one_process_adds_them_up_in_that_order(packages: Path, schedule: str) -> None:
    expected = tie_ranks.gradients(0, str(packages / "4"), "1f1b", None, SEED)
    assert_close(tie_ranks.gradients(0, str(packages / "4"), schedule, None, SEED), expected, rtol=0, atol=0)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, loss: torch.Tensor, fails: bool) -> torch.Tensor:
        context.fails = fails
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.fails:
            raise ValueError("broken on purpose")
        return gradient, None


class FailsAt:
    """Fails when an action begins, or when it has ended."""

    def __init__(self, action: str, ended: bool) -> None:
        self.action, self.ended = action, ended

    def begin(self, rank: int, action: Any) -> None:
        if not self.ended:
            self.look(action)

    def end(self, rank: int, action: Any, saved: Any) -> None:
        if self.ended:
            self.look(action)

    def look(self, action: Any) -> None:
        if str(action) == self.action:
            raise ValueError("broken on purpose")


def gradients_of_failed_step(package: str, action: str = "", ended: bool = False) -> dict[str, torch.Tensor]:
    """The gradients after a good step and one that fails at an action, or else in the loss of microbatch 1."""
    calls = 0

    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        fails = not action and calls == 6  # of the second step, after four of the first
        return FailsBackward.apply(loss(output, target), fails)

    run = models.start(package, "gpipe", kernels="autograd", loss_fn=failing, loss_over="microbatch")
    run.pipe.step(run.batch_of(0)[0], target=run.batch_of(0)[1])
    run.pipe.observe(FailsAt(action, ended))
    with refused(RuntimeFault, "broken on purpose"):
        run.pipe.step(run.batch_of(1)[0], target=run.batch_of(1)[1])
    return {name: parameter.grad for name, parameter in run.pipe.named_parameters() if parameter.grad is not None}


def test_a_failed_step_leaves_what_was_added_up_until_then(tmp_path: Path) -> None:
    """The gradients of tied weights are like others, whether the step fails during a backward or outside of one."""
    folder = str(write(models.perceptrons(4, shared=True), tmp_path / "package"))
    gradients = tie_ranks.gradients(0, folder, "gpipe", None, None)
    assert_close(gradients_of_failed_step(folder, "0B3", ended=True), gradients)
    early_gradients = gradients_of_failed_step(folder, "3B0")
    late_gradients = gradients_of_failed_step(folder, "3B1")
    within = gradients_of_failed_step(folder)
    assert_close(within, late_gradients, rtol=0, atol=0)
    changed = {name for name in gradients if not within[name].equal(early_gradients[name])}
    assert {"shared.weight", "embed.weight", "norm.weight"} <= changed


def test_a_run_goes_on_to_the_last_digit(packages: Path, saved: Saved) -> None:
    folder, losses = saved
    runs = ranks.run(checkpoint_ranks.resume, 2, str(packages / "4"), "zb-v", {"pp": 2}, str(folder), 8, SEED)
    assert runs == [losses] * 2


@pytest.mark.parametrize("stages", ["1", "2"])
def test_other_cuts_go_on(packages: Path, saved: Saved, stages: str) -> None:
    """A stage that uses a weight twice adds up its two gradients of each microbatch first."""
    folder, losses = saved
    run = models.start(packages / stages, seed=SEED)
    run.load(folder)
    resumed_losses = run.train(5, 10)
    assert resumed_losses[0] == losses[0]
    assert_close(resumed_losses, losses, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_mesh_reads_and_writes_what_one_process_does(packages: Path, saved: Saved, tmp_path: Path) -> None:
    """Four stages on two ranks, each of which another one shares."""
    folder, _ = saved
    shape = {"pp": 2, "dp_shard": 2}
    package = write(models.perceptrons(4, shared=True), tmp_path / "without dropout")
    arguments = (str(package), shape, str(folder), str(tmp_path / "mesh"), "interleaved-1f1b")
    for first, again, same_numbers in ranks.run(checkpoint_ranks.over_mesh, 4, *arguments):
        assert first == again and same_numbers
    run = models.start(packages / "4")
    place = run.load(tmp_path / "mesh").folder
    tensors = checkpoint_ranks.content(place)
    assert "model.shared.weight" in tensors and "optimizer.exp_avg.shared.bias" in tensors
    assert_close(tensors, checkpoint_ranks.content(folder / "step-00000005"), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        pytest.param({"pp": 2, "dp_shard": 2}, (8, 6), marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp_replicate": 2}, (8, 6), marks=pytest.mark.slow),
    ],
    ids=["dp_shard", "dp_replicate"],
)
def test_data_parallel_ranks_train_as_the_unsplit_model(
    shape: meshes.Shape, rows: tuple[int, ...], tmp_path: Path
) -> None:
    folder = str(write(meshes.perceptrons(4, shared=True), tmp_path / "perceptrons"))
    cases = [(folder, shape, schedule, rows, {}) for schedule in ("zb-v", "interleaved-1f1b")]
    assert ranks.run(meshes.train_each, 4, cases, timeout=110) == [[]] * 4


@pytest.mark.slow  # data-parallel ranks do, too
def test_ranks_of_one_stage_each_train_as_the_unsplit_model(tmp_path: Path) -> None:
    folder = str(write(meshes.perceptrons(4, shared=True), tmp_path / "perceptrons"))
    cases = [(folder, {"pp": 4}, schedule, (8,), {}) for schedule in ("1f1b", "zb-h1")]
    assert ranks.run(meshes.train_each, 4, cases, timeout=110) == [[]] * 4


def idle(stages: int) -> Sketch:
    """Stages of one layer each, and a weight of all of them, each time under another name, that none uses."""
    values: dict[str, tuple[str, tuple[int | str, ...], bool]] = {"x": ("float32", (2, 8), False)}
    parts = []
    for index in range(stages):
        input_name = "x" if index == 0 else f"h{index - 1}"
        init = f"self.idle{index} = nn.Linear(8, 8, bias=False)\nself.layer{index} = nn.Linear(8, 8)"
        parts.append(Stage(input_name, f"h{index}", init, f"return torch.tanh(self.layer{index}({input_name}))"))
        values[f"h{index}"] = ("float32", (2, 8), True)
    tied = tuple(f"idle{index}.weight" for index in range(stages))
    return Sketch(tuple(parts), values, f"h{stages - 1}", (tied,))


@pytest.mark.parametrize("stages", [2, 3])
def test_a_weight_that_no_stage_uses_gets_no_gradient(stages: int, tmp_path: Path) -> None:
    """As in the unsplit model: with a gradient of zeros it would decay."""
    folder = str(write(idle(stages), tmp_path / "idle"))
    assert ranks.run(tie_ranks.gradient_of_idle_weight, stages, folder) == ["none"] * stages
    assert tie_ranks.gradient_of_idle_weight(0, folder) == "none"
