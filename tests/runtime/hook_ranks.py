"""What each rank along tp finds of a model with hooks of tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor

from pipegraph.errors import ArgumentError
from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from tests.models import tensor_hooks as models

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def trained_along_tp(rank: int, folder: str, kind: str) -> str:
    """The message of the error that refuses the plan; empty if all gradients are those of the whole model."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(0)
    model, x, target = models.Residual(getattr(models, kind)), torch.randn(8, 5, 8), torch.randn(8, 5, 8)
    loss_fn = nn.MSELoss()
    try:
        pipe = Pipeline(Package.open(folder), "1f1b", 4, loss_fn=loss_fn, mesh=mesh, kernels="eager", tp_plan=PLAN)
    except ArgumentError as error:
        return str(error)
    pipe.step(x, target=target)
    loss_fn(model(x), target).backward()
    expected = dict(model.named_parameters())
    for stage in pipe.stages.values():
        for name, parameter in stage.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(whole, expected[name].grad, msg=lambda text, name=name: f"{name}: {text}")
    return ""
