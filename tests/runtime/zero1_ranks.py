"""What ranks run in `test_zero1.py`: data-parallel pipelines that divide the optimizer's state."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

from pipegraph import Pipeline
from pipegraph.cost.model_output import default_loss


def train(rank: int, package: str, divides: bool) -> tuple[list[float], int]:
    """The losses of three steps, and the bytes of this rank's optimizer state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns as it is imported

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
    pipe = Pipeline(package, "1f1b", 2, mesh=mesh, kernels="eager", loss_fn=lambda output, target: default_loss(output))
    parameters = list(pipe.parameters())
    if divides:
        group = mesh.get_group("dp_replicate")
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, process_group=group, lr=1e-2
        )
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + pipe.dp_rank)
        loss = pipe.step(torch.randn(32, 16, generator=generator), target=torch.zeros(32)).loss
        assert loss is not None
        losses.append(loss.item())
        optimizer.step()
    states = (optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer).state.values()
    return losses, sum(moment.nbytes for state in states for moment in state.values() if moment.dim())
