"""What ranks run to clip gradients by their norm, and to scale them: functions for `ranks.run`."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing import assert_close

from pipegraph.package import Package
from pipegraph.runtime.gradients import clip_grad_norm
from tests.runtime.packages import Reference, batch, loss
from tests.runtime.parity import arguments
from tests.runtime.pipelines import pipeline


def clip(rank: int, folder: str, norm_types: list[float]) -> str:
    """Clipping over all ranks equals clipping of the unsplit model, where a tied weight is one parameter."""
    for norm_type in norm_types:
        _clip(folder, norm_type)
    return "equal"


def _clip(folder: str, norm_type: float) -> None:
    package = Package.open(folder)
    pipe = pipeline(package, schedule="gpipe", microbatches=2, loss_fn=loss)
    reference = Reference(package)
    inputs = batch(package.manifest, 2)
    args, kwargs = arguments(package, inputs)
    target = torch.linspace(0, 1, 4)
    pipe.step(*args, target=target, **kwargs)
    loss(reference(inputs), target).backward()
    unique_parameters = {id(parameter): parameter for parameter in reference.parameters.values()}.values()
    for _ in range(2):
        expected = torch.nn.utils.clip_grad_norm_(unique_parameters, 0.1, norm_type)
        assert_close(pipe.clip_grad_norm_(0.1, norm_type), expected)
    for name, parameter in pipe.named_parameters():
        assert_close(parameter.grad, reference.parameters[name].grad)


def clip_not_a_number(rank: int, folder: str, norm_types: list[float]) -> list[tuple[float, bool]]:
    """With a NaN on each rank in turn: the norm, and whether it spoils all gradients here."""
    pipe = pipeline(folder, microbatches=2, loss_fn=loss)
    inputs, _ = arguments(pipe.package, batch(pipe.package.manifest, 2))
    clipped = []
    for norm_type in norm_types:
        for spoiled in range(2):
            for parameter in pipe.parameters():
                parameter.grad = None
            pipe.step(*inputs, target=torch.zeros(4))
            if rank == spoiled:
                next(pipe.parameters()).grad.view(-1)[0] = torch.nan
            norm = float(pipe.clip_grad_norm_(1.0, norm_type))
            clipped.append((norm, all(bool(parameter.grad.isnan().all()) for parameter in pipe.parameters())))
    return clipped


def greatest_of_shards(rank: int, numbers: list[float]) -> float:
    """The infinity norm of a gradient that is sharded over a mesh of the user's own, apart from the pipeline's."""
    full_tensor = torch.tensor(numbers)
    sharded = torch.nn.Parameter(distribute_tensor(full_tensor, init_device_mesh("cpu", (2,)), [Shard(0)]))
    sharded.grad = sharded.detach().clone()
    return float(clip_grad_norm([sharded], [sharded], 1.0, torch.inf, None, torch.device("cpu")))


def scaled_elsewhere(rank: int, folder: str) -> str:
    """A scaler of a pipeline that is gone, with another model on one rank alone, and in another pipeline."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def train() -> Any:
        pipe = pipeline(folder, "1f1b", "eager", microbatches=2, loss_fn=lambda *args: scaler.scale(loss(*args)))
        (inputs,) = batch(pipe.package.manifest, 2).values()
        pipe.step(inputs, target=torch.zeros(len(inputs)))
        finish(torch.optim.SGD(pipe.parameters(), lr=0.1))
        return pipe

    def finish(optimizer: torch.optim.Optimizer) -> None:
        scaler.step(optimizer)
        scaler.update()

    attributes = set(vars(scaler))
    train()
    gc.collect()
    assert set(vars(scaler)) == attributes
    if rank == 0:
        model = torch.nn.Linear(2, 2)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        finish(torch.optim.SGD(model.parameters(), lr=0.1))
    first = train()
    second = train()
    del first  # which does not end what the second has changed
    gc.collect()
    assert set(vars(scaler)) > attributes
    del second
    return "done"


def scale(rank: int, folder: str, infinite: int) -> list[float]:
    """With a new GradScaler: its scale after a step in which one rank's gradient is infinite, and after a good one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    pipe = pipeline(folder, "1f1b", "eager", microbatches=2, loss_fn=lambda *args: scaler.scale(loss(*args)))
    (inputs,) = batch(pipe.package.manifest, 2).values()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scales = []
    for is_good in (False, True):
        old_parameters = [parameter.detach().clone() for parameter in pipe.parameters()]
        optimizer.zero_grad()
        pipe.step(inputs, target=torch.zeros(len(inputs)))
        if rank == infinite and not is_good:
            next(pipe.parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        stays = [torch.equal(old, new) for old, new in zip(old_parameters, pipe.parameters(), strict=True)]
        assert not any(stays) if is_good else all(stays)
        scales.append(scaler.get_scale())
    return scales
