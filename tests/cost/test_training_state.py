"""What training holds for each parameter, compared with torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.training_state import PRECISIONS, TrainingState
from pipegraph.errors import ArgumentError
from pipegraph.package.prediction import PRECISIONS as OF_FILES
from pipegraph.runtime.precision import PRECISIONS as OF_RUNS
from tests.messages import refused


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.mixer = nn.Conv1d(16, 16, 3, padding=1)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mixer(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x).relu()
        return self.frozen(x)


TOKENS = torch.arange(12).reshape(2, 6)
TWO_MOMENTS = 2 * 4


def muon(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """As its documentation says: hidden matrices by Muon, everything else by AdamW."""
    embedding = parameters[0]
    matrices = [parameter for parameter in parameters if parameter.dim() == 2 and parameter is not embedding]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in parameters if id(parameter) not in chosen]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(others)]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda parameters: [torch.optim.AdamW(parameters)]),
        ("sgd", lambda parameters: [torch.optim.SGD(parameters)]),
        ("sgd-momentum", lambda parameters: [torch.optim.SGD(parameters, momentum=0.9)]),
        ("muon", muon),
        ("adafactor", lambda parameters: [torch.optim.Adafactor(parameters)]),
    ],
)
def test_the_state_is_that_of_the_optimizer(
    name: str, make: Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]
) -> None:
    model = Model()
    optimizers = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    model(TOKENS).square().sum().backward()
    state_bytes = 0
    for optimizer in optimizers:
        optimizer.step()
        states: list[dict[str, Any]] = list(optimizer.state.values())
        state_bytes += sum(entry.nbytes for state in states for key, entry in state.items() if key != "step")
    captured = pipegraph.capture(model, (TOKENS,))
    assert TrainingState(optimizer=name).bytes_of(captured, captured.state.values()) == state_bytes


@pytest.mark.parametrize(
    ("precision", "parameters", "gradients", "optimizer"),
    [
        (None, 4, 4, 8),
        ("fp32", 4, 4, 8),
        ("bf16", 4 + 2, 4, 8),
        ("bf16-true", 2, 2, 4),
        ("bf16-master", 2, 4, 4 + 8),
        ("fp8", 2 + 2, 4, 4 + 8),
    ],
)
def test_bytes_of_a_parameter(precision: str | None, parameters: int, gradients: int, optimizer: int) -> None:
    model = pipegraph.capture(Model(), (TOKENS,))
    plan = pipegraph.plan(model, ["layers.1"], precision=precision, hardware="h100")
    assert plan.prediction is not None
    memory = plan.prediction.memory_parts
    trained = sum(parameter.numel() for parameter in Model().parameters() if parameter.requires_grad)
    frozen = 16 * 16 + 16
    assert sum(rank.parameters for rank in memory) == parameters * (trained + frozen)
    assert sum(rank.gradients for rank in memory) == gradients * trained
    assert sum(rank.optimizer_state for rank in memory) == optimizer * trained
    assert all(rank.total == size for rank, size in zip(memory, plan.prediction.memory, strict=True))
    assert all(rank.allowance > 0 for rank in memory)


def test_an_optimizer_of_others() -> None:
    model = pipegraph.capture(Model(), (TOKENS,))
    plan = pipegraph.plan(model, ["layers.1"], precision="bf16-master", optimizer_bytes=3)
    assert plan.prediction is not None and plan.prediction.optimizer == "3 bytes for each parameter"
    trained = sum(parameter.numel() for parameter in Model().parameters() if parameter.requires_grad)
    assert sum(rank.optimizer_state for rank in plan.prediction.memory_parts) == (4 + 3) * trained


def test_names_are_those_of_runs_and_files() -> None:
    assert tuple(PRECISIONS) == OF_FILES
    assert {name: of_run.computed for name, of_run in OF_RUNS.items()} == {
        name: precision.computed for name, precision in PRECISIONS.items() if name in OF_RUNS
    }
    for name, of_run in OF_RUNS.items():
        copies = of_run.computed.itemsize if of_run.is_mixed else 0
        assert (PRECISIONS[name].parameter, PRECISIONS[name].copies) == (of_run.stored.itemsize, copies)


def test_products_in_8_bits_are_faster_where_the_device_has_them() -> None:
    model = pipegraph.capture(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), (torch.randn(4096, 1024),))
    steps = {}
    for precision in ("bf16-master", "fp8"):
        plan = pipegraph.plan(model, ["2"], precision=precision, hardware=Hardware.load("h100"))
        assert plan.prediction is not None
        steps[precision] = plan.prediction.value
    assert steps["fp8"] < 0.85 * steps["bf16-master"]
    with refused(ArgumentError, "a100", "float8", advice="h100"):
        pipegraph.plan(model, ["2"], precision="fp8", hardware="a100")
