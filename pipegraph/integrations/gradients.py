"""What trainers with a loop of their own need of a step that does the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from pipegraph.errors import ArgumentError
from pipegraph.runtime.pipeline import Pipeline


def known_loss(loss: Tensor | None) -> Tensor:
    """Return the loss of a step. Raises ArgumentError if this rank has none."""
    if loss is None:
        raise ArgumentError(
            "this rank does not know the loss of a step.",
            "Pipeline(…, loss_fn=…) without broadcast_loss=False.",
        )
    return loss.detach()


@contextmanager
def gradients_divided(pipe: Pipeline, divisor: int) -> Iterator[None]:
    """A context in which a step adds gradients that are divided by a number."""
    if divisor == 1:
        yield
        return
    for parameter in pipe.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(divisor)
    try:
        yield
    finally:  # also if the batch is refused
        for parameter in pipe.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
