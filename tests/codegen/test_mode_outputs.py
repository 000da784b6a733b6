"""Outputs that a model has in one mode only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegraph.runtime.pipeline import Pipeline
from tests.codegen.layers import Layers, batch
from tests.codegen.parity import split


class AuxiliaryHead(Layers):
    """Returns more in training mode."""

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        h = self.a(x)
        extra = self.c(h) if self.training else None
        y = self.b(h)
        return {"y": y, "extra": extra} if extra is not None else y


class OtherOutput(Layers):
    """Returns in evaluation mode what it does not return in training mode."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.a(x)
        return (self.b(h), self.c(h)) if self.training else self.b(h).softmax(-1)


class NoneInEvaluation(AuxiliaryHead):
    """Returns None in the place of what it does not compute."""

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        h = self.a(x)
        return {"y": self.b(h), "extra": self.c(h) if self.training else None}


@pytest.mark.filterwarnings("ignore:.* got no gradient in a step, as in the model")
@pytest.mark.parametrize(("build", "schedule"), [(AuxiliaryHead, "1f1b"), (NoneInEvaluation, "zb-h1")])
def test_outputs_of_training_alone(build: type[nn.Module], schedule: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    package = split(tmp_path, model, (batch(),), cut="b")
    assert package.manifest.evaluation_outputs is not None

    def loss(output: Any, target: Tensor) -> Any:
        parts = output.values() if isinstance(output, dict) else [output]
        return sum((part - target).square().mean() for part in parts if part is not None)

    pipe = Pipeline(package, schedule=schedule, microbatches=2, loss_fn=loss, kernels="eager")
    x, target = batch(4, 8), torch.zeros(4, 8)
    for training in (False, True, False):
        model.train(training)
        for stage in pipe.stages.values():
            stage.train(training)
        expected = model(x)
        result = pipe.step(x, target=target, return_outputs=True)
        torch.testing.assert_close(result.loss, loss(expected, target))
        torch.testing.assert_close(result.outputs, expected)
        torch.testing.assert_close(pipe.eval(x), expected)


def test_what_is_no_branch_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not compute the same in evaluation mode.*test_mode_outputs.py:.*self"):
        split(tmp_path, OtherOutput(), (batch(),), cut="b")
