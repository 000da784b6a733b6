"""What ranks run in tests of stages with a parameter without dimensions, and with a batch norm."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from pipegraph import Pipeline
from pipegraph.errors import ArgumentError
from pipegraph.package import Package
from tests.runtime.packages import Reference, Sketch, Stage, loss

WIDTH = 4
VALUES = {
    "x": ("float32", ("batch", WIDTH), False),
    "h": ("float32", ("batch", WIDTH), True),
    "y": ("float32", ("batch", WIDTH), True),
}


def sketch(norm: str) -> Sketch:
    """Two stages: a layer and a scale without dimensions; and a norm of this class."""
    init = f"self.scale = nn.Parameter(torch.tensor(1.5))\nself.first = nn.Linear({WIDTH}, {WIDTH})"
    first = Stage("x", "h", init, "return self.first(x).tanh() * self.scale")
    return Sketch((first, Stage("h", "y", f"self.norm = nn.{norm}({WIDTH})", "return self.norm(h)")), VALUES, "y")


def train(rank: int, folder: str, shape: dict[str, int], schedule: str) -> dict[str, float]:
    """How far the gradients, and the weights after a step of SGD, are from those of the unsplit model, at the most."""
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    pipe = Pipeline(folder, schedule, 2, loss_fn=loss, mesh=mesh, kernels="eager", timeout=60)
    x, target = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)), torch.arange(8.0)
    place = mesh.get_local_rank("dp_shard")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(x.chunk(2)[place], target=target.chunk(2)[place])
    reference = Reference(Package.open(folder))
    loss(reference({"x": x}), target).backward()
    distances = {}
    for name, parameter in pipe.named_parameters():
        expected = reference.parameters[name]
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert gradient is not None
        assert expected.grad is not None
        distances[name] = float((gradient - expected.grad).abs().max())
    optimizer.step()
    torch.optim.SGD(reference.parameters.values(), lr=0.1).step()
    for name, parameter in pipe.named_parameters():
        weight = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        distances[name] = max(distances[name], float((weight - reference.parameters[name]).detach().abs().max()))
    return distances


def half_precision(rank: int, folder: str) -> str:
    """What a policy says to a batch norm that keeps float32 statistics."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "dp_shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    try:
        Pipeline(folder, "interleaved-1f1b", 2, loss_fn=nn.MSELoss(), mesh=mesh, fsdp={"mp_policy": policy})
    except ArgumentError as error:
        return str(error)
    return "nothing"
