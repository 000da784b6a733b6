"""A pipeline against plain autograd, in one process or as one rank of many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close

from pipegraph.package import CALLER, Package
from tests.runtime.packages import Reference, batch, loss
from tests.runtime.pipelines import pipeline


def assert_parity(
    folder: Path,
    schedule: str,
    microbatches: int = 4,
    steps: int = 2,
    accumulate: int = 1,
    kernels: Any = "autograd",
) -> None:
    """Loss, outputs, gradients and trained parameters equal the unsplit model's over several optimizer steps."""
    package = Package.open(folder)
    pipe = pipeline(package, schedule=schedule, microbatches=microbatches, loss_fn=loss, kernels=kernels)
    reference = Reference(package)
    pipe_sgd = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    model_sgd = torch.optim.SGD({id(p): p for p in reference.parameters.values()}.values(), lr=0.1, momentum=0.9)
    for number in range(steps):
        for part in range(accumulate):
            inputs = batch(package.manifest, microbatches, seed=10 * number + part)
            target = torch.randn(len(next(iter(inputs.values()))), generator=torch.Generator().manual_seed(number))
            args, kwargs = arguments(package, inputs)
            result = pipe.step(*args, target=target, return_outputs=True, return_losses=True, **kwargs)
            expected = reference(inputs)
            expected_loss = loss(expected, target)
            expected_loss.backward()
            if len(reference.stages) - 1 in pipe.stages:
                assert_close(result.loss, expected_loss.detach(), rtol=1e-5, atol=1e-6)
                assert_close(result.losses.mean(), result.loss)
                assert result.losses.shape == (microbatches,)
                assert_close(result.outputs, expected, rtol=1e-5, atol=1e-6)
            else:
                assert_close(result.loss, expected_loss.detach(), rtol=1e-5, atol=1e-6)
                assert (result.losses, result.outputs) == (None, None)
        for index, stage in pipe.stages.items():
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                whole_gradient = reference.parameters[name].grad
                assert (parameter.grad is None) == (whole_gradient is None), (index, name)
                if whole_gradient is not None:
                    assert_close(parameter.grad, whole_gradient, rtol=1e-5, atol=1e-6, msg=f"{index} {name} {schedule}")
        for optimizer in (pipe_sgd, model_sgd):
            optimizer.step()
            optimizer.zero_grad()
        for name, tensor in pipe.state_dict().items():
            if name in reference.parameters:
                assert_close(tensor, reference.parameters[name].detach(), rtol=1e-5, atol=1e-6)


def arguments(package: Package, inputs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Inputs by name as the positional and keyword arguments of `step`."""
    manifest = package.manifest
    assert all(manifest.values[name].producer == CALLER for name in inputs)
    return [inputs.get(name) for name in manifest.args], {key: inputs[name] for key, name in manifest.kwargs.items()}
