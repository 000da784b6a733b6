"""Parameters that a model does not train, or not with every loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.codegen.package_files import generate
from pipegraph.graph.passes.gradients import untrained_parameters


class Heads(nn.Module):
    """Two heads on one body, and a layer that nothing uses, or that the gradient is cut off from."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body, self.one, self.other = (nn.Linear(4, 4) for _ in range(3))
        self.unused, self.cut, self.frozen = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.outputs = outputs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x) + self.cut(x).detach() + self.frozen(x)
        return (self.one(h), self.other(h))[: self.outputs]


@pytest.mark.parametrize(
    ("outputs", "untrained"),
    [
        (1, {"cut.weight", "unused.weight", "other.weight", "other.bias"}),
        (2, {"cut.weight", "unused.weight", "one.weight", "one.bias", "other.weight", "other.bias"}),
    ],
)
def test_what_some_loss_does_not_train(outputs: int, untrained: set[str]) -> None:
    captured = pipegraph.capture(Heads(outputs), (torch.randn(2, 4),))
    assert untrained_parameters(captured) == untrained
    manifest = generate(pipegraph.plan(captured, points=["one"]), weights=False).manifest
    assert {name for stage in manifest.stages for name in stage.untrained or ()} == untrained
