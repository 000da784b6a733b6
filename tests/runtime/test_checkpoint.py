"""Checkpoints: written whole, and read back at other cuts, schedules and meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from pipegraph.errors import CheckpointError, RuntimeFault
from pipegraph.runtime.checkpoint import checkpointer
from pipegraph.runtime.checkpoint.storage import on_host
from pipegraph.runtime.processes.group import ConnectionLost
from tests.messages import refused, warned
from tests.runtime import checkpoint_models as models
from tests.runtime import checkpoint_ranks, ranks
from tests.runtime.packages import loss, write
from tests.runtime.pipelines import pipeline

Saved = tuple[Path, list[float | None]]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in 1, 2 and 4 stages."""
    folder = tmp_path_factory.mktemp("packages")
    for stages in (1, 2, 4):
        write(models.perceptrons(stages), folder / str(stages))
    return folder


@pytest.fixture(scope="module")
def saved(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of a run of 2 stages that was saved at step 5, and its losses after that."""
    folder = tmp_path_factory.mktemp("run")
    run = models.start(packages / "2")
    run.train(0, 5)
    assert run.save(folder, 5) == folder / "step-00000005"
    return folder, run.train(5, 10)


@pytest.mark.parametrize(("stages", "schedule"), [("2", "1f1b"), ("4", "zb-v"), ("1", "gpipe"), ("4", "zb-h1")])
def test_it_goes_on_at_other_cuts_and_schedules(packages: Path, saved: Saved, stages: str, schedule: str) -> None:
    folder, losses = saved
    run = models.start(packages / stages, schedule)
    run.train(0, 1)
    checkpoint = run.load(folder)
    assert (checkpoint.step, checkpoint.folder, checkpoint.extra) == (5, folder / "step-00000005", {})
    # In one stage both gradients of the tied weight are added up together, in another order.
    assert run.train(5, 10) == (pytest.approx(losses, rel=1e-6) if stages == "1" else losses)


def test_two_processes_go_on_and_one_process_after_them(packages: Path, saved: Saved, tmp_path: Path) -> None:
    folder, losses = saved
    arguments = (str(packages / "4"), "zb-v", str(folder), str(tmp_path))
    (early_losses, late_losses), *_ = ranks.run(checkpoint_ranks.go_on, 2, *arguments)
    assert early_losses + late_losses == losses  # in a V the last stage is on rank 0
    run = models.start(packages / "2")
    assert run.load(tmp_path).step == 7
    assert run.train(7, 10) == losses[2:]


@pytest.mark.parametrize(
    ("shape", "stages"),
    [
        ({"dp_shard": 2}, "1"),
        pytest.param({"tp": 2}, "1", marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp_shard": 2}, "2", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_goes_on_and_one_process_after_it(
    packages: Path, saved: Saved, shape: dict[str, int], stages: str, tmp_path: Path
) -> None:
    """Sums over ranks have another order, but what is read is what was written."""
    folder, losses = saved
    count = 4 if len(shape) > 1 else 2
    arguments = (str(packages / stages), shape, str(folder), str(tmp_path / "mesh"))
    outcomes = ranks.run(checkpoint_ranks.over_mesh, count, *arguments)
    for first, again, same_numbers in outcomes:
        assert first == again and same_numbers
        assert_close(torch.tensor(first if first[0] else losses), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    run = models.start(packages / "4", "zb-v")
    place = run.load(tmp_path / "mesh").folder
    again = run.save(tmp_path / "alone", 5)
    expected = checkpoint_ranks.content(folder / "step-00000005")
    for checkpoint in (place, again):
        assert_close(checkpoint_ranks.content(checkpoint), expected, rtol=0, atol=0)
    assert run.train(5, 10) == losses


def test_a_rank_that_cannot_save_is_named_by_all_and_nothing_is_left(packages: Path, tmp_path: Path) -> None:
    messages = ranks.run(checkpoint_ranks.refuse, 2, str(packages / "2"), str(tmp_path))
    assert messages[0] == messages[1]
    full, background, foreign, step, extra, optimizer, missing = messages[0]
    assert "rank 1: OSError" in full and "step-00000001 was not saved" in full
    assert background == full
    assert "rank 1" in foreign and "pipe.parameters()" in foreign
    assert "step=2" in step and "step=1" in step
    assert "other names on rank 1" in extra and ": b." in extra
    assert "no optimizer" in optimizer
    assert "no checkpoint" in missing
    assert all(message.startswith("CheckpointError: ") for message in messages[0])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_rank_that_is_killed_while_it_saves_leaves_the_one_before(packages: Path, tmp_path: Path) -> None:
    message, _ = ranks.run(checkpoint_ranks.killed, 2, str(packages / "2"), str(tmp_path))
    assert message.startswith("RuntimeFault: ")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_rank_that_dies_before_the_first_save_is_noticed_at_once(packages: Path, tmp_path: Path) -> None:
    """Ranks that were connected before do not wait for the timeout."""
    outcome, _ = ranks.run(checkpoint_ranks.die_before_the_first_save, 2, str(packages / "2"), str(tmp_path))
    message, seconds = outcome
    assert message.startswith("RuntimeFault: ") and "rank 1 is gone" in message
    assert seconds < checkpoint_ranks.TIMEOUT_SECONDS / 2
    assert list(tmp_path.glob("step-*")) == []


@pytest.mark.parametrize("late", ["prepare_local_plan", "write_data"])
def test_a_step_that_fails_ends_what_is_saved_beside_it(packages: Path, tmp_path: Path, late: str) -> None:
    for is_whole, step, save in ranks.run(checkpoint_ranks.fail_beside, 2, str(packages / "2"), str(tmp_path), late):
        assert is_whole
        assert step.startswith("RuntimeFault: ") and "broken on purpose" in step
        assert save.startswith("CheckpointError: ") and "step-00000002 was not saved" in save
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_ties_are_stored_once_and_what_never_stepped_has_no_state(packages: Path, saved: Saved) -> None:
    tensors = checkpoint_ranks.content(saved[0] / "step-00000005")
    assert "model.embed.weight" in tensors and "model.head.weight" not in tensors
    assert "model.norm.running_mean" in tensors
    assert f"model.{models.FROZEN}" in tensors and f"optimizer.exp_avg.{models.FROZEN}" not in tensors
    assert "optimizer.exp_avg.embed.weight" in tensors
    run = models.start(packages / "4")
    run.load(saved[0])
    frozen = dict(run.pipe.named_parameters())[models.FROZEN]
    assert frozen not in run.optimizer.state
    assert run.scheduler.last_epoch == 5
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.025, 0.025]
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0.0]


def test_a_fresh_run_is_saved_and_takes_the_state_away(packages: Path, tmp_path: Path) -> None:
    models.start(packages / "2").save(tmp_path, 0)
    run = models.start(packages / "4")
    run.train(0, 1)
    assert run.load(tmp_path).step == 0
    assert not run.optimizer.state


def test_state_keeps_its_own_dtype_and_may_be_plain_numbers(packages: Path, tmp_path: Path) -> None:
    """Parameters in bfloat16 with weights in float32 in the optimizer."""

    def run_of(stages: str) -> models.Run:
        run = models.start(packages / stages, parallelize_fn=bfloat, loss_fn=lambda x, y: loss(x.float(), y))
        run.optimizer = models.MasterSGD(run.pipe.parameters(), lr=0.1)
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 3)
        return run

    run, second_run = run_of("2"), run_of("4")
    run.train(0, 3)
    place = run.save(tmp_path / "first", 3)
    second_run.load(tmp_path / "first")
    expected, actual = (checkpoint_ranks.content(path) for path in (place, second_run.save(tmp_path / "second", 3)))
    assert {actual[f"{part}.norm.weight"].dtype for part in ("model", "optimizer.master")} == {
        torch.bfloat16,
        torch.float32,
    }
    assert_close(actual, expected, rtol=0, atol=0)
    assert {state["steps"] for state in second_run.optimizer.state.values()} == {3}


def test_random_numbers_go_on(packages: Path, tmp_path: Path) -> None:
    run = models.start(packages / "1")
    torch.manual_seed(3)
    run.save(tmp_path, 1)
    numbers = torch.rand(4)
    assert run.load(tmp_path).has_random_state
    assert torch.equal(torch.rand(4), numbers)


def bfloat(stage: Any) -> Any:
    return stage.to(torch.bfloat16)


def damage(place: Path, how: str) -> None:
    data = max(place.glob("*.distcp"), key=lambda file: file.stat().st_size)
    if how == "changed":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "cut off":
        data.write_bytes(data.read_bytes()[:-1])
    elif how == "missing":
        data.unlink()
    else:
        (place / how).write_text("{")


@pytest.mark.parametrize("how", ["changed", "cut off", "missing", ".metadata", "checkpoint.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(how: str, packages: Path, tmp_path: Path) -> None:
    run = models.start(packages / "1")
    for step in (1, 2):
        run.save(tmp_path, step)
    damage(tmp_path / "step-00000002", how)
    with warned("step-00000002", "step-00000001 is taken"):
        assert run.load(tmp_path).step == 1
    damage(tmp_path / "step-00000001", how)
    with refused(CheckpointError, "no checkpoint", "step-00000002", "step-00000001", advice="restore"):
        run.load(tmp_path)
    with refused(CheckpointError, "no checkpoint", "step-00000002", advice="restore"):
        run.load(tmp_path / "step-00000002")


def test_old_ones_are_dropped_and_what_killed_processes_left(packages: Path, tmp_path: Path) -> None:
    run = models.start(packages / "1")
    (tmp_path / ".step-00000009.partial").mkdir()
    (tmp_path / "notes").mkdir()
    for step in (1, 2, 3, 4):
        run.save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000003", "step-00000004"]
    run.save(tmp_path, 3, keep=1)  # after going back; the later one is another past's, and not this run's to drop
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000003", "step-00000004"]
    assert run.load(tmp_path).step == 4
    (tmp_path / "best").symlink_to("step-00000003")
    assert run.load(tmp_path / "step-00000003").step == run.load(tmp_path / "best").step == 3


def test_what_is_saved_in_the_background_is_of_its_step(packages: Path, saved: Saved, tmp_path: Path) -> None:
    folder, losses = saved
    run = models.start(packages / "2")
    run.load(folder)
    place = run.save(tmp_path, 5, background=True)
    assert run.train(5, 10) == losses
    run.save(tmp_path, 10, background=True)
    assert place.is_dir()  # a save waits for the one before
    run.pipe.wait_for_save()
    assert_close(checkpoint_ranks.content(place), checkpoint_ranks.content(folder / "step-00000005"), rtol=0, atol=0)


def test_a_copy_on_the_host_shares_no_memory() -> None:
    tensors = {"step": torch.tensor(1.0), "weight": torch.nn.Parameter(torch.ones(2)), "bytes": torch.ones(2).byte()}
    copied = on_host(tensors)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(1)
    assert_close(copied, {"step": torch.tensor(1.0), "weight": torch.ones(2), "bytes": torch.ones(2).byte()})


def test_a_rank_that_is_lost_in_the_background_is_the_cause(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By it a launcher tells the rank that failed first from those that failed because of it."""
    lost = ConnectionLost(1, "its connection closed")

    def lose(*_: Any) -> Path:
        raise lost

    monkeypatch.setattr(checkpointer, "write", lose)
    run = models.start(packages / "1")
    run.save(tmp_path, 1, background=True)
    with refused(RuntimeFault, "rank 1 is gone", "saving", "step-00000001") as caught:
        run.pipe.wait_for_save()
    assert caught.value.__cause__ is lost


def test_an_error_in_the_background_is_raised_once(packages: Path, tmp_path: Path) -> None:
    run = models.start(packages / "1")
    (tmp_path / "file").touch()
    run.save(tmp_path / "file" / "run", 1, background=True)
    with refused(CheckpointError, "step-00000001", "NotADirectoryError", advice="a folder"):
        run.save(tmp_path, 2)
    assert run.pipe.wait_for_save() is None
    assert run.save(tmp_path, 2).is_dir()


@pytest.mark.parametrize(
    ("other", "options", "parts", "advice"),
    [
        ({"width": 4}, {}, ["another model", "layers.0.0.weight", "[8, 8]", "[4, 4]", "and 12 more"], "the folder"),
        ({"tied": False}, {}, ["another model", "lacks head.weight"], "the package"),
        ({}, {"parallelize_fn": bfloat}, ["dtype", "torch.float32 there, and torch.bfloat16"], "the precision"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(
    other: dict[str, Any], options: dict[str, Any], parts: list[str], advice: str, saved: Saved, tmp_path: Path
) -> None:
    pipe = pipeline(write(models.perceptrons(2, **other), tmp_path / "other"), **options)
    original_state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    with refused(CheckpointError, *parts, advice=advice):
        pipe.load(saved[0])
    assert all(torch.equal(original_state[name], tensor) for name, tensor in pipe.state_dict().items())


def test_another_optimizer_is_refused_and_none_takes_the_model_alone(packages: Path, saved: Saved) -> None:
    run = models.start(packages / "1")
    pipe, parameters = run.pipe, list(run.pipe.parameters())
    with refused(CheckpointError, "AdamW", "SGD"):
        pipe.load(saved[0], torch.optim.SGD(parameters), run.extra)
    with refused(CheckpointError, "embed.weight", "only in that of the optimizer", advice="load()"):
        pipe.load(saved[0], torch.optim.AdamW(parameters), run.extra)
    fewer = [{"params": [parameter for parameter in parameters if parameter.dim() > 1]}]
    with refused(CheckpointError, "layers.0.0.bias", "only in that of the checkpoint", advice="load()"):
        pipe.load(saved[0], torch.optim.AdamW(fewer), run.extra)
    assert pipe.load(saved[0]).extra["scheduler"]["last_epoch"] == 5


@pytest.mark.parametrize(
    ("rates", "keeps_empty"),
    [([0.1, 0.2, 0.3], True), ([0.1, 0.1, 0.1], False)],  # without empty groups, equal ones cannot be told apart
)
def test_a_group_of_an_optimizer_may_be_empty_on_some_ranks(
    packages: Path, tmp_path: Path, rates: list[float], keeps_empty: bool
) -> None:
    early, late = ranks.run(checkpoint_ranks.save_groups, 2, str(packages / "2"), str(tmp_path), rates, keeps_empty)
    assert (early, late) == ([rates[0], rates[2]], [rates[1], rates[2]])
    pipe = models.start(packages / "1").pipe
    optimizer = models.by_depth(pipe, [1.0] * 3)
    pipe.load(tmp_path, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    if not keeps_empty:  # groups that were one do not become several with options of their own
        with refused(CheckpointError, "group of the optimizer", "layers.4.0.bias", advice="the same groups"):
            pipe.load(tmp_path, models.by_depth(pipe, [1.0, 2.0, 3.0]))


def test_extras_have_to_be_those_that_were_saved(packages: Path, saved: Saved, tmp_path: Path) -> None:
    run = models.start(packages / "1")
    with refused(CheckpointError, 'extra has "schedulers"', 'state of "scheduler"', advice="save()"):
        run.pipe.load(saved[0], extra={"schedulers": run.scheduler})
    with refused(CheckpointError, '"scheduler" was an object', advice="save()"):
        run.pipe.load(saved[0], extra={"scheduler": 3})
    with refused(CheckpointError, 'extra["path"]', advice="add_safe_globals"):
        run.pipe.save(tmp_path, step=1, extra={"path": tmp_path})
    with refused(CheckpointError, "step", "-1", advice="step=100"):
        run.pipe.save(tmp_path, step=-1)
    with refused(CheckpointError, "keep", "0", advice="keep=3"):
        run.pipe.save(tmp_path, step=1, keep=0)
    with refused(CheckpointError, str(tmp_path), "no checkpoint", advice="save()"):
        run.pipe.load(tmp_path)
    with refused(CheckpointError, str(tmp_path / "run"), "no folder", advice="save()"):
        run.pipe.load(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
