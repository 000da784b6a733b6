"""A value that crosses lies in memory as it does in the model: channels last where its convolution leaves it so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import pipegraph
from pipegraph.package import Package
from tests.runtime import ranks
from tests.runtime.pipelines import pipeline

CHANNELS_LAST = (0, 2, 3, 1)


class Model(nn.Module):
    """Takes a picture as it is, or with the channels last, and hands on two values of other layouts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.mixer, self.head = nn.Linear(6, 6), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        turned = self.mixer(x.flatten(2)[..., :6]).transpose(1, 2)
        x = torch.tanh(self.second(x)) * turned.mean((1, 2))[:, None, None, None]
        return self.head(x.mean((2, 3)) + turned.sum(1))


def pictures(rows: int, channels_last: bool) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(rows, 3, 5, 7)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def write(folder: Path, channels_last: bool) -> Package:
    captured = pipegraph.capture(Model(), (pictures(2, channels_last),))
    return pipegraph.write_package(pipegraph.plan(captured, points=["second"]), folder / "package")


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(rank: int | None, folder: str, channels_last: bool, schedule: str, kernels: str) -> str:
    """A step, whose gradients are those of the model on the microbatches one after the other.

    Autograd's are so to the last digit. A gradient of weights that is computed by itself may round otherwise.
    """
    model, x, target = Model(), pictures(6, channels_last), torch.ones(6, 2)
    stage_inputs: list[Tensor] = []
    pipe = pipeline(folder, schedule, kernels, microbatches=3, loss_fn=loss)
    looks = kernels == "autograd" and 1 in pipe.stages
    if looks:
        pipe.stages[1].register_forward_pre_hook(lambda _, inputs: stage_inputs.extend(inputs))
    for rows, expected in zip(x.split(2), target.split(2), strict=True):
        (loss(model(rows), expected) / 3).backward()
    pipe.step(x, target=target)
    parameters = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        rounding = 0 if kernels == "autograd" else 1e-6
        assert_close(parameter.grad, parameters[name].grad, rtol=rounding, atol=rounding)
    orders = {tensor.dim(): tensor.dim_order() for tensor in stage_inputs}
    assert orders == ({4: CHANNELS_LAST if channels_last else (0, 1, 2, 3), 3: (0, 2, 1)} if looks else {})
    if kernels == "eager":
        assert {kernel.compilations for kernel in pipe.kernels_report()} == {1}  # beforehand, for what then arrives
    return "equal"


def test_the_manifest_says_how_a_value_lies_in_memory(tmp_path: Path) -> None:
    values = write(tmp_path, True).manifest.values.values()
    orders = {len(value.shape): value.dim_order for value in values if value.producer == 0}
    assert orders == {4: CHANNELS_LAST, 3: (0, 2, 1)}


def test_what_is_contiguous_is_not_mentioned(tmp_path: Path) -> None:
    package = write(tmp_path, False)
    text = (package.path / "pipeline.json").read_text()
    assert text.count("dim_order") == 1  # of what the model transposes


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("schedule", "kernels"), [("1f1b", "autograd"), ("zb-h1", "eager")])
def test_stages_of_one_process_are_the_model(channels_last: bool, schedule: str, kernels: str, tmp_path: Path) -> None:
    assert train(None, str(write(tmp_path, channels_last).path), channels_last, schedule, kernels) == "equal"


@pytest.mark.parametrize(("schedule", "kernels"), [("1f1b", "autograd"), ("zb-h1", "eager")])
def test_processes_are_the_model(schedule: str, kernels: str, tmp_path: Path) -> None:
    arguments: Any = (str(write(tmp_path, True).path), True, schedule, kernels)
    assert ranks.run(train, 2, *arguments) == ["equal"] * 2
