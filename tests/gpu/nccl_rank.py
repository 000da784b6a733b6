"""What a single rank over NCCL runs: functions for `ranks.run`. Several ranks would need a GPU each."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed import init_device_mesh

from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from tests.runtime.meshes import LENGTH, WORDS, whole
from tests.runtime.packages import loss

STEPS = 4


def start(folder: str, shape: dict[str, int], **options: Any) -> Pipeline:
    mesh = init_device_mesh("cuda", tuple(shape.values()), mesh_dim_names=tuple(shape))
    options = {"loss_fn": loss, "kernels": "eager", "timeout": 60, **options}
    return Pipeline(Package.open(folder), "1f1b", 4, mesh=mesh, device="cuda", **options)


def train(pipe: Pipeline, first: int, end: int) -> list[float]:
    """The losses of these steps, each with a clipped norm."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    found = []
    for number in range(first, end):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(WORDS, (8, LENGTH), generator=generator).cuda()
        target = torch.randn(8, generator=generator).cuda()
        result = pipe.step(tokens, target=target)
        assert result.loss is not None
        pipe.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        found.append(result.loss.item())
    return found


def losses(rank: int, folder: str, shape: dict[str, int], options: dict[str, Any]) -> list[float] | list[str]:
    """The losses over a mesh of one rank, or what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(start(folder, shape, **options), 0, STEPS)
    warned = [str(each.message) for each in caught if "traced" in str(each.message)]
    return warned or found


def saved_and_resumed(rank: int, folder: str, shape: dict[str, int], own: str) -> tuple[bool, bool]:
    """Whether a run that continues from a checkpoint has the state and the random numbers of the one that saved it."""
    pipe = start(folder, shape)
    train(pipe, 0, 2)
    pipe.save(own, step=2, background=True)
    pipe.wait_for_save()
    drawn = torch.rand(3, device="cuda")
    resumed = start(folder, shape)
    resumed.load(own)
    again = torch.rand(3, device="cuda")
    state = {name: whole(each) for name, each in pipe.state_dict().items()}
    same = all(torch.equal(whole(each), state[name]) for name, each in resumed.state_dict().items())
    return same, torch.equal(drawn, again)
