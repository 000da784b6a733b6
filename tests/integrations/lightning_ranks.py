"""What ranks run in `test_lightning.py`: the collectives of a strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from pipegraph import Pipeline
from pipegraph.integrations.lightning import PipelineStrategy


def collectives(rank: int, package: str) -> dict[str, Any]:
    """Reductions of a number that is equal on the ranks of one pipeline: 1 on the first, 2 on the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
    pipe = Pipeline(package, "1f1b", 2, mesh=mesh, kernels="eager")
    strategy = PipelineStrategy(pipe)
    number = torch.tensor(pipe.dp_rank + 1)
    reduced = {name: strategy.reduce(number, reduce_op=name).item() for name in ("mean", "sum", "max", "min")}
    return {
        **reduced,
        "gathered": strategy.all_gather(number).tolist(),
        "all": strategy.reduce_boolean_decision(rank != 3),
        "any": strategy.reduce_boolean_decision(rank == 3, all=False),
        "none": strategy.reduce_boolean_decision(False, all=False),
    }
