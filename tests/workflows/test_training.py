"""Training on what a model file says: as the unsplit model is trained, saved on the way, and refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pipegraph
from pipegraph.arguments import asked_by_command
from pipegraph.errors import BatchError, CheckpointError, PipegraphError, SourceError
from pipegraph.graph.sources import load
from pipegraph.package import Package
from pipegraph.schedule import build
from pipegraph.workflows.run_checkpoints import CheckpointOptions, Evaluation, TrainingStep, read_log
from pipegraph.workflows.train import Training
from tests.messages import refused, warned
from tests.models import counting

FILE = Path(counting.__file__)
Trainer = Callable[..., Training]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Package]:
    """The same model in 2 and in 3 stages."""
    folder = tmp_path_factory.mktemp("counting")
    source = load(str(FILE))
    captured = pipegraph.capture(source.model, source.args)
    points = {2: ["layers.2"], 3: ["layers.1", "layers.3"]}
    return {
        stages: pipegraph.write_package(pipegraph.plan(captured, points=cuts), folder / str(stages), source=source)
        for stages, cuts in points.items()
    }


@pytest.fixture
def trainer(packages: dict[int, Package], tmp_path: Path) -> Trainer:
    """Makes a `Training`: with lines that are added to the model file, and options of checkpoints."""

    def make(lines: str = "", stages: int = 2, every: int | None = None, **options: Any) -> Training:
        file = tmp_path / FILE.name
        file.write_text(f"{FILE.read_text()}\n\n{lines}\n")
        checkpoints = None if every is None else CheckpointOptions(tmp_path / "run", every)
        schedule = build("1f1b", stages, 4)
        source = load(str(file), weights=False)
        return Training(packages[stages], schedule, source, kernels="eager", checkpoints=checkpoints, **options)

    return make


def losses(training: Training, count: int | None) -> list[float]:
    return [step.loss for step in training.steps(count) if isinstance(step, TrainingStep)]


def unsplit(steps: int) -> tuple[list[float], list[float], float]:
    """Losses, accuracies and the loss of the evaluation after them, of the model as a loop of torch's trains it."""
    model = counting.build_model()
    optimizer = counting.optimizer(list(model.parameters()))
    scheduler = counting.scheduler(optimizer)
    figures: list[tuple[float, float]] = []
    for step in range(steps):
        tokens, target = counting.batch(step)
        optimizer.zero_grad()
        logits = model(tokens)
        loss = counting.loss_fn(logits, target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        figures.append((loss.item(), counting.metrics(logits, target)["accuracy"].item()))
    with torch.no_grad():
        last = [counting.loss_fn(model(tokens), target) for tokens, target in counting.evaluation_data(0, 1)]
    return [loss for loss, _ in figures], [accuracy for _, accuracy in figures], float(torch.stack(last).mean())


def test_it_trains_as_the_unsplit_model(trainer: Trainer) -> None:
    *steps, evaluation = trainer().steps(8)
    expected, accuracies, evaluated = unsplit(8)
    assert [step.loss for step in steps] == pytest.approx(expected, rel=1e-5)
    assert all(isinstance(step, TrainingStep) for step in steps)
    assert [step.metrics["accuracy"] for step in steps] == pytest.approx(accuracies, rel=1e-5)  # type: ignore[union-attr]
    assert isinstance(evaluation, Evaluation)
    assert (evaluation.index, evaluation.loss) == (7, pytest.approx(evaluated, rel=1e-5))


def test_a_step_says_how_fast_it_is_and_how_long_it_lasts(trainer: Trainer) -> None:
    first, second, third, _ = trainer().steps(3)
    assert str(first).count("   ") == 3  # index, loss, accuracy, seconds
    assert "tokens/s   " in str(second) and str(second).endswith(" left")
    assert str(third).endswith(" tokens/s")


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "def data(rank, world):\n    step = 0\n    while True:\n        yield batch(step)\n        step += 1",
    ],
    ids=["state", "skipped"],
)
def test_it_goes_on_where_it_was_in_the_data(trainer: Trainer, tmp_path: Path, lines: str) -> None:
    expected = losses(trainer(lines), 9)
    assert losses(trainer(lines, every=2), 5) == expected[:5]
    again = trainer(lines, every=2, stages=3)
    assert (again.done, again.resumed_from) == (5, tmp_path / "run/step-00000005")
    assert losses(again, 4) == expected[5:]
    assert [entry["loss"] for entry in read_log(tmp_path / "run") if "loss" in entry] == expected
    evaluated = [entry["step"] for entry in read_log(tmp_path / "run") if "evaluation" in entry]
    assert evaluated == [1, 3, 4, 5, 7, 8]
    done = trainer(lines, every=2)
    assert list(done.steps(0)) == []


def test_the_log_forgets_what_is_done_again(trainer: Trainer, tmp_path: Path) -> None:
    expected = losses(trainer(every=4), 4)
    log = tmp_path / "run/log.jsonl"
    log.write_text(log.read_text() + json.dumps({"step": 4, "loss": 99.0}) + '\n{"step": 5, "lo')
    trainer(every=4)
    assert [entry["loss"] for entry in read_log(tmp_path / "run") if "loss" in entry] == expected


def test_evaluation_is_in_evaluation_mode(trainer: Trainer) -> None:
    training = trainer()
    modes: list[bool] = []
    for stage in training._pipeline.stages.values():
        stage.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    list(training.steps(1))
    assert set(modes) == {True, False}
    assert all(stage.training for stage in training._pipeline.stages.values())


def test_an_evaluation_is_the_mean_over_rows(trainer: Trainer) -> None:
    """The last batch of a loader may be smaller: it counts as its rows do."""
    lines = """
def evaluation_data(rank, world):
    tokens, target = batch(7)
    return [batch(6), (tokens[:2], target[:2])]
"""
    *_, evaluation = trainer(lines).steps(1)
    model = counting.build_model()
    optimizer = counting.optimizer(list(model.parameters()))
    tokens, target = counting.batch(0)
    counting.loss_fn(model(tokens), target).backward()
    optimizer.step()
    pairs = [counting.batch(6), tuple(tensor[:2] for tensor in counting.batch(7))]
    tokens, target = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    expected = counting.loss_fn(model(tokens), target).item()
    assert isinstance(evaluation, Evaluation) and evaluation.loss == pytest.approx(expected, rel=1e-5)


def test_a_file_says_what_counts_in_its_loss(trainer: Trainer) -> None:
    lines = """
def loss_fn(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")


def loss_weight(target):
    return (target != 0).sum()
"""
    step_losses = losses(trainer(lines), 1)
    tokens, target = counting.batch(0)
    logits = counting.build_model()(tokens).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, target.flatten(), ignore_index=0)
    assert step_losses == pytest.approx([expected.item()], rel=1e-5)


def test_data_that_ends_ends_the_run_and_what_is_done_is_saved(trainer: Trainer, tmp_path: Path) -> None:
    lines = "def data(rank, world):\n    return [batch(step) for step in range(3)]"
    assert len(losses(trainer(lines), None)) == 3
    training = trainer(lines, every=100)
    with refused(SourceError, "data(0, 1) of counting.py", "3 of 5 steps", "step 3", advice="--steps 3"):
        losses(training, 5)
    assert (tmp_path / "run/step-00000003").is_dir()
    assert len(read_log(tmp_path / "run")) == 4


@pytest.mark.parametrize(
    ("lines", "kind", "parts", "advice"),
    [
        (
            "yield tokens[:, :, None], target",
            BatchError,
            ["batch 2 of data(0, 1)", "tokens", "[8, 6, 1]"],
            "dimensions",
        ),
        ("yield tokens.float(), target", BatchError, ["batch 2 of data(0, 1)", "tokens is float32"], "to(torch.int64)"),
        ("yield tokens, target[:-1]", BatchError, ["batch 2 of data(0, 1)", "target has 7 rows"], "8 rows"),
        ("yield tokens", SourceError, ["data(0, 1)", "Tensor"], "target"),
        ("1 / 0", SourceError, ["data(0, 1)", "batch 2", "ZeroDivisionError"], "--debug"),
    ],
)
def test_data_that_cannot_be_trained_on_lose_nothing(
    trainer: Trainer, tmp_path: Path, lines: str, kind: type[PipegraphError], parts: list[str], advice: str
) -> None:
    """Two steps that no checkpoint has yet are saved before the run ends."""
    good = "def data(rank, world):\n    for step in range(4):\n        tokens, target = batch(step)\n"
    bad = f"        if step == 2:\n            {lines}\n"
    training = trainer(f"{good}{bad}        yield tokens, target", every=100)
    with refused(kind, *parts, "counting.py", "saved as step 2", advice=advice):
        losses(training, 4)
    again = trainer(f"{good}        yield tokens, target", every=100)
    assert (again.done, again.resumed_from) == (2, tmp_path / "run/step-00000002")
    assert losses(again, 2) == pytest.approx(unsplit(4)[0][2:], rel=1e-5)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("data = [1, 2]", "data is a list"),
        ("def data(rank, world):\n    return 3", "data(0, 1) of counting.py returned a int"),
        ("def data(rank, world):\n    return []", "data(0, 1) of counting.py ended after 0 of 2 steps"),
        ("def data(rank, world):\n    return [batch(0)[0]]", "is a Tensor"),
        ("def data(rank, world):\n    yield batch(0)\n    1 / 0", "batch 1 raised ZeroDivisionError"),
        ("def data(rank, world):\n    yield batch(0)[0][:, :, None], 1", "batch 0 of data(0, 1) of counting.py: "),
        ("def optimizer(parameters):\n    return parameters", "optimizer(parameters) returned a list"),
        ("def optimizer(parameters):\n    return AdamW()", "NameError: name 'AdamW'"),
        ("def scheduler(optimizer):\n    return 1", "scheduler(optimizer) returned a int"),
        ("def evaluation_data(rank, world):\n    return []", "evaluation_data(0, 1) of counting.py has no batch"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(trainer: Trainer, lines: str, problem: str) -> None:
    with pytest.raises(PipegraphError) as raised:
        list(trainer(lines).steps(2))
    assert problem in raised.value.problem
    assert str(raised.value).count("\nTry: ") == 1


def test_a_learning_rate_beside_an_optimizer_is_refused(trainer: Trainer) -> None:
    with refused(
        SourceError, "counting.py", "optimizer(parameters)", "--learning-rate", advice="learning rate in the file"
    ):
        trainer(learning_rate=0.1)


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("def optimizer(parameters):\n    return torch.optim.SGD(parameters)", ["AdamW", "SGD"]),
        ("scheduler = None", ['"scheduler"', "the model file has none"]),
    ],
)
def test_a_run_that_was_another_is_not_gone_on_with(
    trainer: Trainer, tmp_path: Path, lines: str, parts: list[str]
) -> None:
    losses(trainer(every=10), 1)
    place, advice = f"the run in {tmp_path / 'run'} cannot continue", "--checkpoint with a new folder"
    with asked_by_command(), refused(CheckpointError, place, *parts, advice=advice):
        trainer(lines, every=10)
    assert losses(trainer(every=10), 1) == unsplit_at(1)


def unsplit_at(step: int) -> Any:
    return pytest.approx([unsplit(step + 1)[0][step]], rel=1e-5)


def test_a_folder_that_is_a_checkpoint_or_a_file_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    losses(trainer(every=10), 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").symlink_to(tmp_path / "moved/step-00000001")
    with refused(CheckpointError, str(tmp_path / "run"), "one checkpoint", advice=f"--checkpoint {tmp_path}"):
        trainer(every=10)
    (tmp_path / "run").unlink()
    (tmp_path / "run").touch()
    with refused(CheckpointError, str(tmp_path / "run"), "file", advice="--checkpoint"):
        trainer(every=10)


def test_lines_that_are_no_entries_of_a_log_are_left_out(trainer: Trainer, tmp_path: Path) -> None:
    expected = losses(trainer(every=4), 4)
    log = tmp_path / "run/log.jsonl"
    lines = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join([lines[0], b"junk", *lines[1:-1], b"[3]", b"\xff\xfe", b'{"loss": 1}', b""]))
    with warned("log.jsonl, line 2 and 3 more"):
        trainer(every=4)
    assert [entry["loss"] for entry in read_log(tmp_path / "run") if "loss" in entry] == expected
