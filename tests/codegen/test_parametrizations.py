"""Layers with a parametrization of torch stay these layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import pipegraph
from tests.codegen.parity import differences, source, split


class Normed(nn.Module):
    """Weights by their norms, in training mode with iterations that write into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(8, 8, 3, padding=1), dim=2)
        self.proj = spectral_norm(nn.Linear(8, 8), n_power_iterations=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).relu()
        return self.proj(h.mT).mT  # by features


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def model_of_two() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Normed(), Normed(), nn.Conv1d(8, 4, 1))


def test_a_normed_layer_is_made_by_the_function_of_torch(tmp_path: Path) -> None:
    model, batch = model_of_two(), (torch.randn(4, 8, 6),)
    package = split(tmp_path, model, batch, cut="1")
    text = source(package)
    assert "self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1), dim=2)" in text
    assert "self.proj = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8), n_power_iterations=2)" in text
    assert "return self.proj(h.mT).mT  # by features" in text
    assert "original0" not in text
    assert differences(package, model, batch) == []
    assert differences(package, model, batch, train=False) == []


def test_stages_train_on_microbatches(tmp_path: Path) -> None:
    model = model_of_two().eval()
    package = split(tmp_path, model, (torch.randn(4, 8, 6),), cut="1")
    pipe = pipegraph.Pipeline(package, "zb-h1", microbatches=2, loss_fn=F.mse_loss, kernels="eager")
    x, target = torch.randn(4, 8, 9), torch.randn(4, 4, 9)
    loss = F.mse_loss(model(x), target)
    torch.testing.assert_close(pipe.step(x, target=target).loss, loss.detach())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close({name: parameter.grad for name, parameter in pipe.named_parameters()}, gradients)


def test_stages_without_weights_are_equal_everywhere(tmp_path: Path) -> None:
    package = split(tmp_path, model_of_two(), (torch.randn(4, 8, 6),), cut="1")
    stages = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with pytest.warns(UserWarning, match="original"):  # a guess: torch has no rule for them
            stages.append(package.load_stage(0, weights=False, seed=5))
    first, second = stages
    parameters = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        assert parameter.isfinite().all() and torch.equal(parameter, parameters[name]), name


def test_a_parametrization_of_the_model_is_written_from_the_graph(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Doubled())
    model, batch = nn.Sequential(layer, nn.Linear(8, 8)), (torch.randn(4, 8),)
    package = split(tmp_path, model, batch, cut="1")
    assert differences(package, model, batch) == []
