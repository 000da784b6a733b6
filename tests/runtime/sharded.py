"""Functions that ranks run: pipelines with sharded stages, compared with the unsharded and unsplit model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing import assert_close

from pipegraph.kernels import make
from pipegraph.kernels.graphs.block_operation import OPERATION, called_graph
from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.torch_private.operators import is_collective
from tests.runtime.packages import Reference, Sketch, Stage, batch, loss
from tests.runtime.parity import arguments


def perceptrons(hidden: int = 16) -> Sketch:
    """Two stages of two equal residual layers each, after an embedding and before a head with the same weight."""
    layers = (
        "self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))\n"
        "self.layers = nn.ModuleList(\n"
        f"    nn.Sequential(nn.Linear(8, {hidden}), nn.Tanh(), nn.Linear({hidden}, 8)) for _ in range(2)\n"
        ")\n"
    )
    loop = "for norm, layer in zip(self.norms, self.layers):\n    x = x + layer(norm(x))\n"
    rename = {"layers": "later", "norms": "behind"}
    second = [text.replace("layers", rename["layers"]).replace("norms", rename["norms"]) for text in (layers, loop)]
    wide = ("float32", (2, 4, 8), True)
    return Sketch(
        stages=(
            Stage("tokens", "x", f"{layers}self.embed = nn.Embedding(6, 8)", f"x = self.embed(tokens)\n{loop}return x"),
            Stage(
                "x", "logits", f"{second[0]}self.head = nn.Linear(8, 6, bias=False)", f"{second[1]}return self.head(x)"
            ),
        ),
        values={"tokens": ("int64", (2, 4), False), "x": wide, "logits": ("float32", (2, 4, 6), True)},
        outputs="logits",
        tied=(("embed.weight", "head.weight"),),
    )


def _layers(stage: nn.Module) -> list[str]:
    return [name for name, module in stage.named_modules() if isinstance(module, nn.Sequential)]


def tensor_parallel(stage: nn.Module, mesh: DeviceMesh, use_local_output: bool = True) -> None:
    """Shard every weight except those of the norms; each layer has its own styles."""
    plan: dict[str, Any] = {}
    for name in _layers(stage):
        plan |= {f"{name}.0": ColwiseParallel(use_local_output=use_local_output), f"{name}.2": RowwiseParallel()}
    if hasattr(stage, "embed"):
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    if hasattr(stage, "head"):
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(stage, mesh, plan)


def uneven(stage: nn.Module, mesh: DeviceMesh) -> None:
    """The same, with shards of different sizes, which stay DTensors between the layers."""
    tensor_parallel(stage, mesh, use_local_output=False)


def sequence_parallel(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Between stages the whole sequence, within them each rank has a part, norms and residuals included."""
    plan: dict[str, Any] = {}
    if hasattr(stage, "embed"):
        plan[""] = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    else:
        plan[""] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for name in _layers(stage):
        norm = name.replace("layers", "norms").replace("later", "behind")
        plan[norm] = SequenceParallel()
        plan[name] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
        )
        plan |= {f"{name}.0": ColwiseParallel(), f"{name}.2": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(stage, mesh, plan.pop(""))
    parallelize_module(stage, mesh, plan)


PLANS: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "tensor parallel": tensor_parallel,
    "uneven": uneven,
    "sequence parallel": sequence_parallel,
    "fully_shard": lambda stage, mesh: fully_shard(stage, mesh=mesh),
}


def full_tensor(tensor: Any) -> Any:
    """Of all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank: int, folder: str, plan: str, schedule: str, kernels: str, recompute: str = "min-cut") -> list[str]:
    """Two steps of two batches under a pipeline of two ranks, each of two shards. What was warned of."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    package = Package.open(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = Pipeline(
            package,
            schedule=schedule,
            microbatches=4,
            loss_fn=loss,
            group=mesh.get_group("pipeline"),
            kernels=kernels,
            recompute=recompute,
            parallelize_fn=lambda stage: PLANS[plan](stage, mesh["tensor"]),
        )
        assert any(isinstance(parameter, DTensor) for parameter in pipe.parameters())
        _assert_trained(pipe, Reference(package))
    return [str(note.message) for note in caught if "traced" in str(note.message) or "compile" in str(note.message)]


def _assert_trained(pipe: Pipeline, reference: Reference) -> None:
    pipe_adam = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    whole_parameters = list({id(parameter): parameter for parameter in reference.parameters.values()}.values())
    model_adam = torch.optim.AdamW(whole_parameters, lr=0.01)
    for number in range(2):
        for part in range(2):
            inputs = batch(pipe.package.manifest, 4, seed=10 * number + part)
            target = torch.randn(8, generator=torch.Generator().manual_seed(number))
            args, _ = arguments(pipe.package, inputs)
            result = pipe.step(*args, target=target)
            expected = loss(reference(inputs), target)
            expected.backward()
            assert_close(result.loss, expected.detach(), rtol=1e-5, atol=1e-6)
        for name, parameter in pipe.named_parameters():
            gradient: Tensor = parameter.grad
            assert type(gradient) is (DTensor if isinstance(parameter, DTensor) else Tensor)
            assert getattr(gradient, "placements", None) == getattr(parameter, "placements", None), name
            assert_close(full_tensor(gradient), reference.parameters[name].grad, rtol=1e-4, atol=1e-6, msg=name)
        for norm_type in (2.0, math.inf):
            expected_norm = torch.nn.utils.clip_grad_norm_(whole_parameters, 0.1, norm_type)
            assert_close(pipe.clip_grad_norm_(0.1, norm_type), expected_norm)
        for optimizer in (pipe_adam, model_adam):
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in pipe.state_dict().items():
        assert_close(full_tensor(tensor), reference.parameters[name].detach(), rtol=1e-4, atol=1e-5)
    doubled = {name: 2 * parameter.detach() for name, parameter in reference.parameters.items()}
    pipe.load_state_dict(doubled)  # of the whole model, from which every rank takes its shard
    for name, tensor in pipe.state_dict().items():
        assert_close(full_tensor(tensor), doubled[name])


def divided(rank: int, folder: str, plan: str, recompute: str) -> tuple[int, dict[str, list[str]]]:
    """How many blocks the last stage has, and the collectives of each of its parts, in order."""
    mesh = init_device_mesh("cpu", (2,))
    stage = Package.open(folder).load_stage(1)
    PLANS[plan](stage, mesh)
    kernels: Any = make("eager", stage, (True,), (True,), recompute=recompute)
    kernels.forward((torch.ones(2, 4, 8),))
    (variant,) = kernels.variants
    derivative = variant.divided
    parts = {kind: derivative.graph(kind, derivative.full_mask) for kind in "FIWB"}
    return len(derivative.blocks), {kind: list(_collectives(part)) for kind, part in parts.items()}


def _collectives(part: Any) -> Iterator[str]:
    for node in part.module.graph.nodes:
        if node.target is OPERATION:
            yield from _collectives(called_graph(node))
        elif is_collective(node):
            yield node.target.overloadpacket.__name__


def wrongly_sharded(rank: int, folder: str, plan: dict[str, Any], kernels: str) -> None:
    """Shard each stage by the entries of `plan` for modules that it has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    pipe = Pipeline(
        folder,
        microbatches=2,
        loss_fn=loss,
        group=mesh.get_group("pipeline"),
        kernels=kernels,
        parallelize_fn=lambda stage: parallelize_module(
            stage, mesh["tensor"], {name: style for name, style in plan.items() if hasattr(stage, name)}
        ),
    )
    pipe.step(torch.zeros(4, 4, dtype=torch.int64), target=torch.zeros(4))
