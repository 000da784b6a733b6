"""Averages of weights, freezing and thawing, adapters and evaluation in training, as the unsplit model has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

from pipegraph.errors import CheckpointError
from pipegraph.workflows.train import evaluating
from tests.messages import refused
from tests.runtime import precision_models as models
from tests.runtime import ranks, tuned_models
from tests.runtime.checkpoint_ranks import stored_tensors


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in 2 and 4 stages."""
    folder = tmp_path_factory.mktemp("packages")
    for stages in (2, 4):
        models.write_package(folder / str(stages), stages, has_norm=False)
    return folder


@pytest.mark.slow
def test_an_average_of_the_weights_is_read_back_at_other_cuts(packages: Path, tmp_path: Path) -> None:
    pipe, model = models.start(packages / "2", None), models.model(has_norm=False)
    averaged_whole = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(tuned_models.DECAY))
    optimizer, model_optimizer = (torch.optim.AdamW(module.parameters(), lr=0.05) for module in (pipe, model))
    for _ in range(3):
        tuned_models.train(pipe, optimizer, 1)
        tuned_models.average(optimizer)
        tuned_models.whole_step(model)
        model_optimizer.step()
        model_optimizer.zero_grad()
        averaged_whole.update_parameters(model)
    pipe.save(tmp_path, optimizer, step=3)

    restored_pipe = models.start(packages / "4", None, "zb-h1")
    again = torch.optim.AdamW(restored_pipe.parameters(), lr=0.05)
    restored_pipe.load(tmp_path, again)
    x, target = models.batch()
    plain_loss = restored_pipe.evaluate(x, target=target).loss
    with tuned_models.averaged(again):
        loss = restored_pipe.evaluate(x, target=target).loss
        for name, parameter in restored_pipe.named_parameters():
            assert_close(parameter, averaged_whole.module.get_parameter(name), rtol=1e-5, atol=1e-6)
    assert_close(loss, torch.tensor(tuned_models.whole_step(averaged_whole)))
    assert restored_pipe.evaluate(x, target=target).loss == plain_loss != loss


def test_layers_are_frozen_and_thawed_between_steps(packages: Path) -> None:
    pipe, model = models.start(packages / "2", None, "zb-h1"), models.model(has_norm=False)
    optimizer, model_optimizer = (torch.optim.AdamW(module.parameters(), lr=0.05) for module in (pipe, model))
    for frozen in ((), ("layers.0", "layers.3.up"), ("layers.0", "layers.1", "head"), ("layers",), ()):
        for name, parameter in (*pipe.named_parameters(), *model.named_parameters()):
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        (loss,) = tuned_models.train(pipe, optimizer, 1)
        assert loss == pytest.approx(tuned_models.whole_step(model), rel=1e-5)
        model_optimizer.step()
        model_optimizer.zero_grad()
    for name, parameter in pipe.named_parameters():
        assert_close(parameter, model.get_parameter(name), rtol=1e-5, atol=1e-6)


def test_adapters_alone_are_trained_and_saved(packages: Path, tmp_path: Path) -> None:
    def start(stages: int, schedule: str) -> tuple[models.Pipeline, torch.optim.Optimizer]:
        pipe = models.start(packages / str(stages), None, schedule, parallelize_fn=tuned_models.adapt)
        return pipe, torch.optim.SGD(tuned_models.trained(pipe), lr=0.5)

    pipe, optimizer = start(2, "1f1b")
    model = models.model(has_norm=False)
    tuned_models.adapt(model)
    model_optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.5)
    expected = []
    for _ in range(6):
        expected.append(tuned_models.whole_step(model))
        model_optimizer.step()
        model_optimizer.zero_grad()
    losses = tuned_models.train(pipe, optimizer)
    pipe.save(tmp_path, optimizer, step=3, frozen=False)
    stored = [name for name in stored_tensors(tmp_path / "step-00000003").entries if name.startswith("model.")]
    assert {name.rpartition(".")[2] for name in stored} == {"adapter_in", "adapter_out", "shift"}
    restored, again = start(4, "zb-h1")
    restored.load(tmp_path, again)
    assert losses + tuned_models.train(restored, again) == pytest.approx(expected, rel=1e-5)
    with refused(CheckpointError, "lacks head.weight", advice="the package"):
        models.start(packages / "2", None).load(tmp_path)  # there it is trained


def test_ranks_train_adapters(packages: Path) -> None:
    pipe = models.start(packages / "2", None, "zb-h1", parallelize_fn=tuned_models.adapt)
    alone = tuned_models.train(pipe, torch.optim.SGD(tuned_models.trained(pipe), lr=0.5))
    _, losses = ranks.run(tuned_models.train_adapters, 2, str(packages / "2"))
    assert losses == alone


def test_an_evaluation_in_between_changes_nothing(tmp_path: Path) -> None:
    package = models.write_package(tmp_path / "package")
    expected = models.train(models.start(package, None))
    pipe, model = models.start(package, None), models.model().eval()
    x, target = models.batch()
    with evaluating(pipe):
        loss = pipe.evaluate(x, target=target).loss
    assert_close(loss, models.loss(model(x), target))
    losses = []
    for _ in expected:
        losses += models.train(pipe, 1)
        with evaluating(pipe):
            pipe.evaluate(x, target=target)
    assert losses == expected
