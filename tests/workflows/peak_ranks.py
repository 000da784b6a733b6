"""What ranks run in `test_peak_memory.py`: steps of training, with every byte counted."""

from __future__ import annotations

import torch
from torch import Tensor

from pipegraph import Pipeline
from pipegraph.cost.model_output import default_loss
from pipegraph.schedule import build
from tests.workflows.allocations import Allocations
from tests.workflows.test_recompute_memory import INPUT

MICROBATCHES = 4


def peak(rank: int, folder: str, schedule: str, precision: str | None) -> int:
    """The most bytes that a rank holds in the third step: its state, and what the step makes on top of it."""
    batch = INPUT.repeat(MICROBATCHES, 1)
    pipe = Pipeline(
        folder,
        build(schedule, 2, MICROBATCHES),
        kernels="eager",
        precision=precision,
        loss_fn=lambda output, target: default_loss(output),
    )
    optimizer = torch.optim.AdamW(pipe.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        pipe.step(batch, target=torch.zeros(len(batch)))

    for _ in range(2):
        step()
        optimizer.step()
    allocations = Allocations()
    with allocations:
        step()
    return sum(tensor.nbytes for tensor in _state(pipe, optimizer)) + allocations.most


def _state(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = list(pipe.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    moments = [entry for state in optimizer.state.values() for entry in state.values()]
    copies = [copy for stage in pipe.stages for copy in pipe.copies_of(stage)]
    return [*parameters, *gradients, *moments, *copies]
