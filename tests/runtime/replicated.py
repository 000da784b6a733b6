"""Functions that ranks run: pipelines with replicas of their stages, compared with the whole model and batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from tests.runtime.packages import Reference, batch, loss


def with_checkpoints(stage: nn.Module) -> nn.Module:
    """The stage with its linear layers, and all of its sequences, in torch's checkpoint wrapper."""
    for module in list(stage.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, (nn.Linear, nn.Sequential, nn.Embedding)):
                setattr(module, name, checkpoint_wrapper(child))
    return stage


def make(folder: str, schedule: str, kernels: str, wrap: Callable[..., Any], **options: Any) -> tuple[Pipeline, Any]:
    """A pipeline of two ranks that has a replica, and the mesh. `wrap` takes a stage and the group of its replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    group = mesh.get_group("replica")
    options = {"loss_fn": loss, "microbatches": 4, "timeout": 60, **options}
    pipe = Pipeline(
        Package.open(folder),
        schedule,
        kernels=kernels,
        group=mesh.get_group("pipeline"),
        parallelize_fn=lambda stage: wrap(stage, group),
        **options,
    )
    return pipe, mesh


def wrapped(stage: nn.Module, group: Any) -> nn.Module:
    return DistributedDataParallel(stage, process_group=group)


def train(rank: int, folder: str, schedule: str, kernels: str, checkpoints: bool, reduction: str) -> str:
    """Two optimizer steps of two accumulated batches each; the first of the second two is under `no_sync`."""

    def step_loss(output: Any, target: Any) -> Any:
        return loss(output, target) * (len(target) if reduction == "sum" else 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no stage is left to autograd
        pipe, mesh = make(
            folder,
            schedule,
            kernels,
            lambda stage, group: wrapped(with_checkpoints(stage) if checkpoints else stage, group),
            loss_fn=step_loss,
            loss_reduction=reduction,
            check_weights=False,
        )
        reference = Reference(pipe.package)
        parameters = list({id(parameter): parameter for parameter in reference.parameters.values()}.values())
        pipe_sgd, model_sgd = torch.optim.SGD(pipe.parameters(), lr=0.01), torch.optim.SGD(parameters, lr=0.01)
        for number in range(2):
            for part in range(2):
                _step(pipe, mesh, reference, step_loss, seed=10 * number + part, waits=(number, part) == (1, 0))
            for name, parameter in pipe.named_parameters():
                assert_close(parameter.grad, reference.parameters[name].grad, rtol=1e-4, atol=1e-6, msg=name)
            assert_close(pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(parameters, 0.1))
            for optimizer in (pipe_sgd, model_sgd):
                optimizer.step()
                optimizer.zero_grad()
    assert all(isinstance(stage, DistributedDataParallel) for stage in pipe.stages.values())
    expected = {name for stage in pipe.stages for name in pipe.package.manifest.stages[stage].parameters}
    assert {*pipe.state_dict()} == expected
    doubled = {name: 2 * parameter.detach() for name, parameter in reference.parameters.items()}
    pipe.load_state_dict(doubled)
    for name, tensor in pipe.state_dict().items():
        assert_close(tensor, doubled[name])
    return "equal"


def _step(pipe: Pipeline, mesh: DeviceMesh, reference: Reference, step_loss: Any, seed: int, waits: bool) -> None:
    """One step of a batch of which each replica takes half."""
    replica = mesh.get_local_rank("replica")
    inputs = batch(pipe.package.manifest, 8, seed)
    full_batch = next(iter(inputs.values()))
    target = torch.randn(len(full_batch), generator=torch.Generator().manual_seed(seed))
    step_loss(reference(inputs), target).backward()
    for stage in pipe.stages.values():
        stage.require_backward_grad_sync = not waits  # what `no_sync` sets
    pipe.step(full_batch.chunk(2)[replica], target=target.chunk(2)[replica])


def parts_of_the_state(rank: int, folder: str) -> tuple[list[Any], dict[str, Any]]:
    """Stage 0 of the second replica does not use the weight of its norm, and has other flags in a buffer."""
    pipe, mesh = make(folder, "1f1b", "autograd", wrapped, microbatches=1)
    replica = mesh.get_local_rank("replica")
    stage = next(iter(pipe.stages.values()))
    (x,) = batch(pipe.package.manifest, 1, seed=replica).values()
    if 0 in pipe.stages:
        stage.module.register_buffer("flags", torch.tensor([replica == 0, False, True]))
        if replica == 1:
            stage.module.norm.forward = lambda x: F.batch_norm(x, None, None, training=True)
    pipe.step(x, target=torch.zeros(len(x)))
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    return [buffer for _, buffer in stage.module.named_buffers()], gradients


def refused(rank: int, folder: str, how: str) -> None:
    """What is not right is an error that says what to do."""

    def wrap(stage: nn.Module, group: Any) -> nn.Module | None:
        child = next(iter(name for name, _ in stage.named_children()))
        if how == "inside":
            setattr(stage, child, wrapped(getattr(stage, child), group))
        elif how == "replicate":
            replicate(stage, process_group=group)
        elif how == "replicate inside":
            replicate(getattr(stage, child), process_group=group)
        elif how == "mixed precision":
            ddp_stage = wrapped(stage, group)
            ddp_stage.mixed_precision = object()
            return ddp_stage
        elif how.startswith("hook"):
            ddp_stage = wrapped(stage, group)
            if how == "hook":
                ddp_stage.register_comm_hook(None, lambda state, bucket: None)
            return ddp_stage
        return None

    pipe, _ = make(folder, "1f1b", "eager", wrap)
    if how == "hook later":
        for stage in pipe.stages.values():
            stage.register_comm_hook(None, lambda state, bucket: None)
    pipe.step(torch.ones(8, 8), target=torch.zeros(8))


def fully_sharded_replicas(rank: int, folder: str) -> str:
    """The newer `replicate`, which is of FSDP's kind, is left to autograd and reduces each microbatch."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    pipe = Pipeline(
        Package.open(folder),
        "1f1b",
        kernels="autograd",
        loss_fn=loss,
        microbatches=4,
        group=mesh.get_group("pipeline"),
        parallelize_fn=lambda stage: replicate(stage, mesh=mesh["replica"]),
    )
    reference = Reference(pipe.package)
    full_batch = batch(pipe.package.manifest, 8)["x"]
    target = torch.randn(len(full_batch), generator=torch.Generator().manual_seed(0))
    loss(reference({"x": full_batch}), target).backward()
    replica = dist.get_rank() // 2
    pipe.step(full_batch.chunk(2)[replica], target=target.chunk(2)[replica])
    for name, parameter in pipe.named_parameters():
        gradient: Any = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert_close(gradient, reference.parameters[name].grad, msg=name)
    return "equal"
