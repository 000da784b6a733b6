"""Parameters that ranks along `tp` have whole, and whose gradients say something only after some steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import init_device_mesh

import pipegraph
from pipegraph.errors import PipegraphError
from tests.runtime.mesh_mixture import WORDS, loss

PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
SUMMED = {**PLAN, "layers.*.slope": "replicated_with_grad_allreduce"}
STEPS = 3


def _change(how: str, number: int, model: Any) -> None:
    """Change the parameters of a stage, or of the model, before a step."""
    for layer in model.layers.children():
        if number == 0 and "zeros" in how:
            nn.init.zeros_(layer.down.weight)
        if "frozen" in how:
            layer.slope.requires_grad_(number > 0)


def when_refused(rank: int, folder: str, plans: list[tuple[str, dict[str, str]]]) -> list[tuple[int, str]]:
    """For each case the step in which it is refused and the message, or how many steps went well."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return [_when_refused(mesh, folder, how, plan) for how, plan in plans]


def _when_refused(mesh: Any, folder: str, how: str, plan: dict[str, str]) -> tuple[int, str]:
    factor = 1.0

    def scaled(output: Any, target: Any) -> Any:
        return loss(output, target) * factor

    pipe = pipegraph.Pipeline(
        folder, "interleaved-1f1b", 2, scaled, kernels="eager", mesh=mesh, tp_plan=plan, timeout=30
    )
    tokens = torch.arange(32).reshape(4, 8) % WORDS
    for number in range(STEPS):
        for stage in pipe.stages.values():
            _change(how, number, stage)
        factor = float("inf") if how == "infinite" and number == 0 else 1.0
        if how == "infinite":
            pipe.retrace()  # for the factor
        try:
            pipe.step(tokens, target=tokens)
        except PipegraphError as error:
            return number, f"{type(error).__name__}: {error}"
        with torch.no_grad():
            for parameter in pipe.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad.nan_to_num(0, 0, 0)
                parameter.grad = None
    return STEPS, "trained"


def dropped_with_other_seeds(rank: int, folder: str) -> list[str]:
    """What a model with dropout says whose ranks along `tp` have other seeds; without a seed of the pipeline, and with
    one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    outcomes = []
    for seed in (None, 0):
        torch.manual_seed(rank)
        options: dict[str, Any] = {"kernels": "eager", "mesh": mesh, "tp_plan": SUMMED, "timeout": 30, "seed": seed}
        pipe = pipegraph.Pipeline(folder, "interleaved-1f1b", 2, loss, **options)
        tokens = torch.arange(32).reshape(4, 8) % WORDS
        try:
            pipe.step(tokens, target=tokens)
            outcomes.append("trained")
        except PipegraphError as error:
            outcomes.append(str(error))
    return outcomes


def freeze_on_one_rank(rank: int, folder: str, dimension: str) -> str:
    """What is said if one of the ranks that hold the same stages freezes a layer after a step."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dimension,))
    options: dict[str, Any] = {"tp_plan": SUMMED} if dimension == "tp" else {}
    pipe = pipegraph.Pipeline(folder, "interleaved-1f1b", 2, loss, kernels="eager", mesh=mesh, timeout=30, **options)
    tokens = torch.arange(32).reshape(4, 8) % WORDS
    try:
        for number in range(2):
            pipe.step(tokens, target=tokens)
            if (rank, number) == (1, 0):
                next(iter(pipe.stages.values())).layers.requires_grad_(False)
    except PipegraphError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"
