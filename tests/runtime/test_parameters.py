"""The parameters of a pipeline: names, ties, state dicts, initial values, clipping."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.errors import PackageError, PipegraphError, RuntimeFault
from pipegraph.package import MANIFEST, Package
from pipegraph.runtime.gradients import clip_grad_norm
from pipegraph.runtime.pipeline import Pipeline
from tests.messages import refused, warned
from tests.runtime import rank_functions, ranks
from tests.runtime.packages import Reference, batch, loss, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sized_model import write as write_sized
from tests.runtime.sketches import chain, frozen, skips, tied


def test_a_tied_weight_is_one_parameter_with_every_name(tmp_path: Path) -> None:
    pipe = pipeline(write(tied(), tmp_path / "tied"), loss_fn=loss)
    assert [name for name, _ in pipe.named_parameters()] == ["embed.weight", "shared.weight"]
    assert sorted(pipe.state_dict()) == ["embed.weight", "output.weight", "shared.weight"]
    assert pipe.stages[0].embed.weight is pipe.stages[2].output.weight


def test_a_frozen_parameter_stays_frozen(tmp_path: Path) -> None:
    pipe = pipeline(write(frozen(), tmp_path / "frozen"), loss_fn=loss)
    pipe.step(torch.ones(2, 8), target=torch.zeros(2))
    with_gradient = [name for name, parameter in pipe.named_parameters() if parameter.grad is not None]
    assert with_gradient == ["two.weight", "three.weight", "three.bias"]


@pytest.mark.parametrize("kernels", ["autograd", "eager"])
def test_a_parameter_that_lost_its_gradient_is_an_error(kernels: str, tmp_path: Path) -> None:
    pipe, inputs = _without_gradient(write(chain(2), tmp_path / "chain"), kernels)
    with refused(PipegraphError, "layer1.bias of stage 1", "no gradient", advice="requires_grad_(False)"):
        pipe.step(inputs, target=torch.zeros(len(inputs)))


def test_a_parameter_that_the_model_does_not_train_is_told_once(tmp_path: Path) -> None:
    package = Package.open(write(chain(2), tmp_path / "chain"))
    first, last = package.manifest.stages
    stages = first, structs.replace(last, untrained=("layer1.bias",))
    pipe, inputs = _without_gradient(replace(package, manifest=structs.replace(package.manifest, stages=stages)))
    with warned("layer1.bias (stage 1)", "no gradient"):
        pipe.step(inputs, target=torch.zeros(len(inputs)))
    pipe.step(inputs, target=torch.zeros(len(inputs)))


@pytest.mark.parametrize("kernels", ["autograd", "eager"])
def test_a_step_that_would_train_nothing_is_refused(kernels: str, tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), "1f1b", kernels, microbatches=2, loss_fn=loss)
    inputs, target = torch.ones(4, 8), torch.zeros(4)
    for stage in pipe.stages.values():
        stage.requires_grad_(False)
    with refused(PipegraphError, "no parameter", "gradient", advice="pipe.evaluate("):
        pipe.step(inputs, target=target)
    pipe.stages[0].requires_grad_()
    pipe.step(inputs, target=target)


def test_a_loss_may_be_all_that_is_trained(tmp_path: Path) -> None:
    scale = nn.Parameter(torch.ones(()))
    pipe = pipeline(
        write(chain(2), tmp_path / "chain"), "1f1b", loss_fn=lambda output, target: loss(output, target) * scale
    )
    for stage in pipe.stages.values():
        stage.requires_grad_(False)
    pipe.step(torch.ones(2, 8), target=torch.zeros(2))
    assert scale.grad is not None


def test_ranks_refuse_together_a_step_that_would_train_nothing(tmp_path: Path) -> None:
    by_rank = ranks.run(rank_functions.frozen_steps, 2, str(write(chain(2), tmp_path / "chain")))
    for message, _ in by_rank:
        with refused(PipegraphError, "no parameter", "gradient", advice="pipe.evaluate("):
            raise PipegraphError(message)
        assert message.count("Try:") == 1
    assert [trained for _, trained in by_rank] == [[], ["layer1.weight", "layer1.bias"]]


def _without_gradient(package: Package | Path, kernels: str = "autograd") -> tuple[Pipeline, Tensor]:
    """A pipeline whose second stage detaches its bias, and a batch."""
    pipe = pipeline(package, "1f1b", kernels, microbatches=2, loss_fn=loss)
    layer = pipe.stages[1].layer1
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight, layer.bias.detach())
    (inputs,) = batch(pipe.package.manifest, 2).values()
    return pipe, inputs


def test_thawing_what_the_package_has_frozen_is_refused(tmp_path: Path) -> None:
    pipe = pipeline(write(frozen(), tmp_path / "frozen"), loss_fn=loss)
    pipe.stages[0].requires_grad_(True)
    with refused(RuntimeFault, "stage 0", "output 0", "requires_grad false", advice="freeze"):
        pipe.step(torch.ones(2, 8), target=torch.zeros(2))


def test_the_state_dict_is_the_models(tmp_path: Path) -> None:
    pipe = pipeline(write(skips(), tmp_path / "skips"), loss_fn=loss)
    assert "table" not in pipe.state_dict()  # it is not persistent
    assert "table" in dict(pipe.stages[0].named_buffers())
    doubled = {name: tensor * 2 for name, tensor in pipe.state_dict().items()}
    pipe.load_state_dict(doubled)
    assert_close(pipe.state_dict(), doubled)


def test_a_state_dict_may_hold_a_tied_weight_once(tmp_path: Path) -> None:
    pipe = pipeline(write(tied(), tmp_path / "tied"), loss_fn=loss)
    pipe.load_state_dict({"output.weight": torch.ones(6, 8), "shared.weight": torch.zeros(8, 8)})
    assert (pipe.stages[0].embed.weight == 1).all()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"layer3.weight": torch.zeros(8, 8)}, ["holds layer3.weight", 'Did you mean "layer']),
        ({"layer1.weight": None}, ["lacks layer1.weight", "stage 1"]),
        ({"layer1.weight": torch.zeros(3, 8)}, ["stage 1", "layer1.weight", "[3, 8]", "[8, 8]"]),
    ],
    ids=["unknown", "missing", "shape"],
)
def test_a_state_dict_that_does_not_fit_is_refused(change: dict[str, Tensor], parts: list[str], tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), loss_fn=loss)
    state = {name: tensor for name, tensor in (pipe.state_dict() | change).items() if tensor is not None}
    with refused(PackageError, *parts):
        pipe.load_state_dict(state)


def test_clipping_equals_that_of_the_unsplit_model(tmp_path: Path) -> None:
    pipe = pipeline(write(tied(), tmp_path / "tied"), loss_fn=loss)
    reference = Reference(pipe.package)
    inputs, target = batch(pipe.package.manifest, 1), torch.zeros(2)
    pipe.step(*inputs.values(), target=target)
    loss(reference(inputs), target).backward()
    parameters = {id(parameter): parameter for parameter in reference.parameters.values()}.values()
    assert_close(pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(parameters, 0.1))
    for name, parameter in pipe.named_parameters():
        assert_close(parameter.grad, reference.parameters[name].grad)


def test_a_package_without_weights_is_initialised_alike_every_time(tmp_path: Path) -> None:
    folder = write_sized(tmp_path, weights=False)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="holds no weights"):
        first = pipeline(folder, loss_fn=loss)
    sample = torch.rand(1)
    torch.manual_seed(1)
    assert_close(torch.rand(1), sample)  # the caller's random numbers were not touched
    with pytest.warns(UserWarning, match="holds no weights"):
        second = pipeline(folder, loss_fn=loss)
    assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    assert all(parameter.any() for parameter in first.parameters())


def test_a_stage_whose_parameters_are_not_the_manifests_is_refused(tmp_path: Path) -> None:
    folder = write(chain(2), tmp_path / "chain")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["stages"][1]["parameters"].remove("layer1.bias")
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with refused(PackageError, "stage 1 ", "added ['layer1.bias']"):
        Pipeline(Package.open(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_has_the_dtype_of_the_gradients(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    parameter.grad = torch.full((3,), 1 / 3, dtype=dtype)
    expected = torch.nn.utils.get_total_norm([parameter.grad])
    norm = clip_grad_norm([parameter], [parameter], 0.1, 2.0, None, torch.device("cpu"))
    assert_close(norm, expected, rtol=0, atol=0)
