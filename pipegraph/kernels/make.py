"""The registry of kernels. Another kind of kernels is one more file and one more line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from pipegraph.errors import PipegraphError, nearest
from pipegraph.kernels.autograd import AutogradKernels
from pipegraph.kernels.interface import Loss, StageKernels

Maker = Callable[[nn.Module, Sequence[bool], Sequence[bool], Loss | None], StageKernels]

_MAKERS: dict[str, Maker] = {
    "autograd": AutogradKernels,
}


def names() -> tuple[str, ...]:
    """The kinds of kernels there are."""
    return tuple(_MAKERS)


def make(
    name: str,
    stage: nn.Module,
    input_gradients: Sequence[bool],
    output_gradients: Sequence[bool],
    loss: Loss | None = None,
) -> StageKernels:
    """The kernels `name` of `stage`.

    `input_gradients` says of each input whether its gradient is wanted, `output_gradients` of each output whether one
    will come; `loss` is the last segment of the last stage.
    """
    if name not in _MAKERS:
        raise PipegraphError(
            f'No kernels are called "{name}".{nearest(name, _MAKERS)} There are: {", ".join(_MAKERS)}.'
        )
    return _MAKERS[name](stage, input_gradients, output_gradients, loss)
