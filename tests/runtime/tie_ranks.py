"""What ranks run in tests of weights that several stages share: functions for `ranks.run`."""

from __future__ import annotations

import torch

from tests.runtime.checkpoint_models import start
from tests.runtime.packages import loss
from tests.runtime.pipelines import pipeline


def gradients(
    rank: int, package: str, schedule: str, shape: dict[str, int] | None, seed: int | None
) -> dict[str, torch.Tensor]:
    """The gradients of this process's parameters after two accumulated steps."""
    run = start(package, schedule, shape, seed=seed)
    for step in range(2):
        tokens, target = run.batch_of(step)
        run.pipe.step(tokens, target=target)
    return {name: parameter.grad for name, parameter in run.pipe.named_parameters() if parameter.grad is not None}


def gradient_of_idle_weight(rank: int, folder: str) -> str:
    """Whether a weight that no stage uses has a gradient after a step; others have one."""
    pipe = pipeline(folder, kernels="eager", microbatches=4, loss_fn=loss)
    pipe.step(torch.ones(8, 8), target=torch.zeros(8))
    gradient_flags = {name: parameter.grad is not None for name, parameter in pipe.named_parameters()}
    assert all(flag for name, flag in gradient_flags.items() if name.startswith("layer"))
    return "some" if any(flag for name, flag in gradient_flags.items() if name.startswith("idle")) else "none"
