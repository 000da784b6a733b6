"""Optimizers that keep lists of tensors continue after a checkpoint as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from pipegraph import Pipeline
from pipegraph.errors import CheckpointError
from tests.messages import refused
from tests.runtime import optimizers, ranks
from tests.runtime.packages import loss, write
from tests.runtime.sketches import chain

X, TARGET = torch.linspace(-1, 1, 32).reshape(4, 8), torch.ones(4)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(chain(2), tmp_path_factory.mktemp("packages") / "2")


def start(package: Path) -> Pipeline:
    return Pipeline(package, "gpipe", 2, kernels="autograd", loss_fn=loss)


def train(pipe: Pipeline, optimizer: Any, steps: int) -> list[float]:
    """The losses of some steps."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        step_loss = pipe.step(X, target=TARGET).loss
        assert step_loss is not None
        losses.append(float(step_loss))
        return step_loss

    losses: list[float] = []
    for _ in range(steps):
        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else (closure(), optimizer.step())
    return losses


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, history_size=4),
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=2, line_search_fn="strong_wolfe"),
        lambda parameters: optimizers.Factors(parameters),
    ],
    ids=["lbfgs", "lbfgs with a line search", "factors"],
)
def test_training_goes_on(make: Any, package: Path, tmp_path: Path) -> None:
    pipe = start(package)
    optimizer = make(list(pipe.parameters()))
    train(pipe, optimizer, 3)
    pipe.save(tmp_path, optimizer, step=3)
    state = optimizers.plain(optimizer.state_dict()["state"])
    expected = train(pipe, optimizer, 3)
    second_pipe = start(package)
    again = make(list(second_pipe.parameters()))
    train(second_pipe, again, 1)
    second_pipe.load(tmp_path, again)
    assert optimizers.plain(again.state_dict()["state"]) == state
    assert train(second_pipe, again, 3) == expected
    assert_close(list(second_pipe.parameters()), list(pipe.parameters()), rtol=0, atol=0)


def test_ranks_read_what_one_process_wrote(package: Path, tmp_path: Path) -> None:
    pipe = start(package)
    optimizer = optimizers.Factors(pipe.parameters())
    train(pipe, optimizer, 3)
    pipe.save(tmp_path, optimizer, step=3)
    expected = [optimizers.plain(optimizer.state[parameter]) for parameter in pipe.parameters()]
    first, second = ranks.run(load_factors, 2, str(package), str(tmp_path))
    assert first + second == expected


def load_factors(rank: int, package: str, folder: str) -> list[Any]:
    pipe = start(Path(package))
    optimizer = optimizers.Factors(pipe.parameters())
    pipe.load(folder, optimizer)
    return [optimizers.plain(optimizer.state[parameter]) for parameter in pipe.parameters()]


def save_lbfgs(rank: int, package: str, folder: str) -> None:
    pipe = start(Path(package))
    optimizer = torch.optim.LBFGS(list(pipe.parameters()), max_iter=1)
    for _ in range(2):
        optimizer.step(lambda: pipe.step(X, target=TARGET).loss or torch.zeros(()))
    pipe.save(folder, optimizer, step=2)


def test_the_state_of_all_parameters_of_a_rank_is_not_read_for_others(package: Path, tmp_path: Path) -> None:
    ranks.run(save_lbfgs, 2, str(package), str(tmp_path))
    pipe = start(package)
    optimizer = torch.optim.LBFGS(list(pipe.parameters()), max_iter=1)
    initial_parameters = [parameter.clone() for parameter in pipe.parameters()]
    with refused(CheckpointError, "LBFGS", "layer0.weight", "layer1.weight", advice="number of ranks"):
        pipe.load(tmp_path, optimizer)
    assert_close(list(pipe.parameters()), initial_parameters, rtol=0, atol=0)
    pipe.load(tmp_path)


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = [{"a": object()}]


def test_what_is_neither_a_tensor_nor_plain_is_refused(package: Path, tmp_path: Path) -> None:
    pipe = start(package)
    optimizer = Odd(pipe.parameters(), lr=0.1)
    train(pipe, optimizer, 1)
    with refused(CheckpointError, "odd of layer0.weight", "object", advice="an optimizer"):
        pipe.save(tmp_path, optimizer, step=1)
    assert not any(tmp_path.iterdir())
