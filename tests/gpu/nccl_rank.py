"""What a single rank over NCCL runs: functions for `ranks.run`. Several ranks would need a GPU each."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed import init_device_mesh

from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from tests.runtime.meshes import LENGTH, WORDS, full_tensor
from tests.runtime.packages import loss

STEPS = 4


def start(folder: str, shape: dict[str, int], **options: Any) -> Pipeline:
    mesh = init_device_mesh("cuda", tuple(shape.values()), mesh_dim_names=tuple(shape))
    options = {"loss_fn": loss, "kernels": "eager", "timeout": 60, **options}
    return Pipeline(Package.open(folder), "1f1b", 4, mesh=mesh, device="cuda", **options)


def train(pipe: Pipeline, first: int, end: int) -> list[float]:
    """The losses of these steps, each with a clipped norm."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    step_losses = []
    for number in range(first, end):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(WORDS, (8, LENGTH), generator=generator).cuda()
        target = torch.randn(8, generator=generator).cuda()
        result = pipe.step(tokens, target=target)
        assert result.loss is not None
        pipe.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(result.loss.item())
    return step_losses


def losses(rank: int, folder: str, shape: dict[str, int], options: dict[str, Any]) -> list[float] | list[str]:
    """The losses over a mesh of one rank, or what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_losses = train(start(folder, shape, **options), 0, STEPS)
    warned = [str(warning.message) for warning in caught if "traced" in str(warning.message)]
    return warned or step_losses


def saved_and_resumed(rank: int, folder: str, shape: dict[str, int], checkpoint: str) -> tuple[bool, bool]:
    """Whether a run that continues from a checkpoint has the state and the random numbers of the one that saved it."""
    pipe = start(folder, shape)
    train(pipe, 0, 2)
    pipe.save(checkpoint, step=2, background=True)
    pipe.wait_for_save()
    numbers = torch.rand(3, device="cuda")
    resumed = start(folder, shape)
    resumed.load(checkpoint)
    again = torch.rand(3, device="cuda")
    state = {name: full_tensor(tensor) for name, tensor in pipe.state_dict().items()}
    equal_state = all(torch.equal(full_tensor(tensor), state[name]) for name, tensor in resumed.state_dict().items())
    return equal_state, torch.equal(numbers, again)
