"""Evaluation mode that only switches off dropouts and batch norms, or leaves them on: one export is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipegraph.graph import evaluation_mode
from pipegraph.graph.export.operation_record import lines_on_in_evaluation
from tests.codegen.parity import differences, split


class Layers(nn.Module):
    """Layers of torch that follow their mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.leaky = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.leaky(self.drop(self.norm(self.linear(x))))


class Functions(nn.Module):
    """Functions of torch that are given the mode, by position and by name."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.layers(x), self.mean, self.variance, training=self.training)
        x = F.rrelu(F.dropout(x, 0.5, self.training), training=self.training)
        x = F.alpha_dropout(torch.dropout(x, 0.5, self.training), training=self.training)
        p = 0.5 if self.training else 0.0
        return x + F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=p)[0]


class OnlyCalledInTraining(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return F.dropout(x) * 2 if self.training else x * 2


class AddsToDropout(Layers):
    """Writes into what a dropout returns, which nothing else reads."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        y = F.dropout(h, training=self.training)
        y += x
        return y


class ComputesWhatNothingReads(Layers):
    """Prepares a kernel for training alone, which is not there."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.linear.weight.unsqueeze(1).exp()
        return super().forward(x)


class AlwaysDrops(Layers):
    """A dropout that drops values in evaluation mode too, beside one that does not."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


class AlwaysRandomSlope(Layers):
    """A random slope that evaluation mode does not switch off. Nothing else asks for the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(self.linear(x), training=True)


class AlwaysOwnStatistics(Layers):
    """A batch norm that has the statistics of the batch in evaluation mode too. Nothing else asks for the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.linear(x), None, None, training=True)


class AlwaysDropsInAHelper(Layers):
    """A dropout that one call switches off and another does not, on one line."""

    def forward(self, x: Tensor) -> Tensor:
        return self._drop(self._drop(super().forward(x), self.training), True)

    def _drop(self, x: Tensor, is_on: bool) -> Tensor:
        return F.dropout(x, 0.5, is_on)


class DropsInEvaluationAlone(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, not self.training)


class OtherOperation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if self.training else x


class ReadsWrittenArgument(Layers):
    """A dropout that is off returns its argument, so that a write into the one is a write into the other."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        y = F.dropout(h, training=self.training)
        y += 1
        return h * y


class ReadsWrittenResult(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        y = self.drop(h)
        h += 1
        return h * y


class WritesIntoView(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        y = F.dropout(h, training=self.training)
        y[:, :4].add_(1)
        return h * y


SWITCHED_OFF = [Layers, Functions, OnlyCalledInTraining, AddsToDropout, ComputesWhatNothingReads]
ALWAYS_ON = [AlwaysDrops, AlwaysRandomSlope, AlwaysOwnStatistics]
OTHERS = [AlwaysDropsInAHelper, OtherOperation]
NOT_ALIKE = [DropsInEvaluationAlone, ReadsWrittenArgument, ReadsWrittenResult, WritesIntoView]

X = torch.randn(6, 8)


@pytest.mark.parametrize("model_class", [*SWITCHED_OFF, *ALWAYS_ON])
def test_what_only_switches_off_is_exported_in_training_mode_alone(
    model_class: type[nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("exported in evaluation mode")

    monkeypatch.setattr(evaluation_mode, "export_in", refuse)
    model = model_class()
    assert lines_on_in_evaluation(model, (X,), {}) is not None
    package = split(tmp_path, model, (X,), cut=1)
    assert differences(package, model, (X,), train=False) == []
    assert differences(package, model, (X,), train=True) == []


@pytest.mark.parametrize("model_class", OTHERS)
def test_what_does_more_in_evaluation_mode_is_as_in_the_model(model_class: type[nn.Module], tmp_path: Path) -> None:
    model = model_class()
    assert lines_on_in_evaluation(model, (X,), {}) is None
    package = split(tmp_path, model, (X,), cut=1)
    assert differences(package, model, (X,), train=False) == []
    assert differences(package, model, (X,), train=True) == []


@pytest.mark.parametrize("model_class", NOT_ALIKE)
def test_what_evaluation_mode_alone_does_is_seen(model_class: type[nn.Module]) -> None:
    assert lines_on_in_evaluation(model_class(), (X,), {}) is None


def test_the_model_is_left_as_it_was() -> None:
    model = Functions().eval()
    model.layers.train()
    modes = [module.training for module in model.modules()]
    lines_on_in_evaluation(model, (X,), {})
    assert [module.training for module in model.modules()] == modes
    assert model.mean.equal(torch.zeros(8)) and model.layers.norm.num_batches_tracked == 0
