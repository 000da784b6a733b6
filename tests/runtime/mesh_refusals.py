"""What does not fit a mesh, one case after the other, as each rank meets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipegraph.errors import ArgumentError, PipegraphError
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.rank_grid import RankGrid
from pipegraph.runtime.processes.world import check_backend
from tests.runtime.meshes import LENGTH, TP_PLAN, make
from tests.runtime.packages import loss


def each_refused(rank: int, folder: str, attempt: str, cases: list[Any]) -> list[str]:
    """What each case raises here, one after the other: after a refusal all ranks can make a new pipeline."""
    outcomes = []
    for case in cases:
        try:
            ATTEMPTS[attempt](rank, folder, case)
            outcomes.append("nothing")
        except PipegraphError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def _with_plan(rank: int, folder: str, plan: Any) -> None:
    """Make a pipeline of two stages, each with half of the ranks along tp."""
    make(folder, {"pp": 2, "tp": dist.get_world_size() // 2}, "1f1b", tp_plan=plan)


def _on_a_mesh(rank: int, folder: str, how: str) -> None:
    names = {"unknown": ("pp", "dp_shrad"), "unnamed": None}.get(how, ("pp", "dp_replicate"))
    mesh: Any = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
    options: dict[str, Any] = {"loss_fn": loss, "kernels": "eager", "timeout": 30, "mesh": mesh}
    if how == "type":
        options["mesh"] = (1, 2)
    elif how == "outside":
        options["mesh"] = DeviceMesh("cpu", [[0]], mesh_dim_names=names)
    elif how == "group":
        options["group"] = dist.group.WORLD
    elif how == "wrapper":
        options["parallelize_fn"] = DistributedDataParallel
    pipe = Pipeline(folder, "1f1b", 2, **options)
    tokens, target = torch.zeros(4, LENGTH, dtype=torch.int64), torch.zeros(4)
    if how == "calls" and rank == 1:
        pipe.eval(tokens)
    elif how == "losses":
        pipe.evaluate(tokens, **({} if rank else {"target": target}))
    elif how == "lists":
        count = 2 + rank
        pipe.step([tokens] * count, target=[target] * count)
    else:
        pipe.step(tokens, target=target)


def _sharded(rank: int, folder: str, how: str) -> None:
    options: dict[str, Any] = {
        "option": {"fsdp": {"mp_polcy": None}},
        "part": {"fsdp": {"reshard_after_forward": 2}},
        "type": {"fsdp": True},
        "resident": {"resident": 0},
        "again": {"parallelize_fn": fully_shard, "fsdp": {"reshard_after_forward": False}},
        "elsewhere": {"parallelize_fn": fully_shard},
        "hooked": {"parallelize_fn": lambda stage: stage.head.weight.register_hook(torch.zeros_like) and None},
    }[how]
    make(folder, {"dp_shard": 2}, "1f1b", **options)


def _changed_later(rank: int, folder: str, case: tuple[str, str]) -> None:
    """A step, a change to the parameters of the stages here, and another step."""
    dimension, how = case
    scale = nn.Linear(1, 1, bias=False)
    shape, options = {dimension: 2}, {"microbatches": 2, "kernels": "autograd"}
    pipe, _ = make(folder, shape, "1f1b", loss_fn=lambda output, _: (output * scale.weight).mean(), **options)
    tokens, target = torch.zeros(8, LENGTH, dtype=torch.int64), torch.zeros(8)
    pipe.step(tokens, target=target)
    for stage in pipe.stages.values():
        last = [module for module in stage.modules() if isinstance(module, nn.Linear)][-1]
        if how == "added":
            last.register_parameter("adapter", nn.Parameter(torch.zeros(1)))
        elif how == "hooked":
            last.weight.register_hook(torch.zeros_like)
        elif how in ("assigned", "evaluated"):
            stage.load_state_dict({name: tensor.clone() for name, tensor in stage.state_dict().items()}, assign=True)
        elif how == "replaced" and rank == 1:
            last.weight = nn.Parameter(last.weight.detach().clone())
    if how == "loss":
        scale.weight = nn.Parameter(torch.ones(1, 1))
    if how == "evaluated":
        pipe.evaluate(tokens, target=target)
    pipe.step(tokens, target=target)


def _along_tp(rank: int, folder: str, how: str) -> None:
    """The ranks divide a stage, and the second one makes another call than the first, or with another batch."""
    pipe, _ = make(folder, {"tp": 2}, "1f1b", tp_plan=TP_PLAN, timeout=20)
    rows = 12 if (how, rank) == ("rows", 1) else 8
    tokens, target = torch.zeros(rows, LENGTH, dtype=torch.int64), torch.zeros(rows)
    if (how, rank) == ("calls", 1):
        pipe.evaluate(tokens, target=target)
    elif how == "evaluation":
        pipe.evaluate(tokens[: 8 - 2 * rank], target=target[: 8 - 2 * rank])
    else:
        pipe.step(tokens, target=target, microbatches=2 if (how, rank) == ("microbatches", 1) else 4)


def _sharded_over(rank: int, folder: str, case: tuple[Any, Any]) -> None:
    """A stage to whose layers `fully_shard` is applied over some dimensions of a mesh."""
    shape, names = case
    make(folder, shape, "1f1b" if shape.get("pp", 1) > 1 else "interleaved-1f1b", shard_by_hand=names)


def _with_other_options(rank: int, folder: str, case: tuple[Any, dict[str, Any]]) -> None:
    """Give other options to the last rank alone."""
    shape, options = case
    common = {"tp_plan": TP_PLAN} if "tp" in shape else {}
    make(folder, shape, "1f1b", **{**common, **(options if rank == 3 else {})})


ATTEMPTS: dict[str, Callable[[int, str, Any], None]] = {
    "plan": _with_plan,
    "mesh": _on_a_mesh,
    "sharding": _sharded,
    "changed later": _changed_later,
    "along tp": _along_tp,
    "sharding over": _sharded_over,
    "options": _with_other_options,
}


def with_gpus(rank: int) -> list[str]:
    """Which grids of ranks with GPUs are refused where the default group was made for gloo."""
    outcomes = []
    for names in (("pp",), ("pp", "tp"), ("dp_shard", "tp")):
        try:
            check_backend(RankGrid(names, (2,) * len(names)), torch.device("cuda:0"))
            outcomes.append("nothing")
        except ArgumentError as error:
            outcomes.append(str(error))
    return outcomes
