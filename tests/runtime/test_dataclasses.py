"""Models that take or return dataclasses: a pipeline has a dict in the place of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import pipegraph
from pipegraph.errors import CaptureError
from tests.messages import refused


@dataclass
class Hidden:
    states: tuple[Tensor, ...]
    attention: Tensor | None = None


@dataclass
class Output:
    """Not registered with ``torch.export``."""

    logits: Tensor
    hidden: Hidden | None = None


@dataclass
class Registered:
    x: Tensor
    scale: float = 2.0


torch.export.register_dataclass(Registered)


@dataclass
class Unknown:
    x: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, features: Tensor | Registered) -> Output:
        x = features if isinstance(features, Tensor) else features.x * features.scale
        hidden = self.a(x).relu()
        return Output(self.b(hidden), Hidden((x, hidden)))


@pytest.mark.parametrize("make", [lambda x: x, Registered])
def test_a_dataclass_is_a_dict_of_its_fields(make: type[Registered], tmp_path: Path) -> None:
    model, x = Model(), torch.randn(4, 8)
    captured = pipegraph.capture(model, (make(x),))
    package = pipegraph.write_package(pipegraph.plan(captured, points=["b"]), tmp_path)

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return (output["logits"] - target).square().mean()

    pipe = pipegraph.Pipeline(package, "gpipe", microbatches=2, loss_fn=loss, kernels="eager")
    target = torch.randn(4, 8)
    result = pipe.step(make(x), target=target, return_outputs=True)
    expected = model(make(x))
    assert expected.hidden is not None
    assert_close(result.loss, loss({"logits": expected.logits}, target))
    hidden = {"states": tuple(expected.hidden.states), "attention": None}
    assert_close(result.outputs, {"logits": expected.logits, "hidden": hidden})


def test_a_dataclass_that_torch_does_not_know_is_no_input() -> None:
    with refused(CaptureError, "Unknown", "dataclass", advice="torch.export.register_dataclass(Unknown)"):
        pipegraph.capture(Model(), (Unknown(torch.randn(4, 8)),))
