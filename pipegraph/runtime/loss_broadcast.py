"""The loss of a step on every rank of its pipeline: the rank of the last stage broadcasts it."""

from __future__ import annotations

import torch
from torch import Tensor

from pipegraph.kernels.autocast import autocast_number
from pipegraph.runtime.processes.rank_grid import PIPELINE
from pipegraph.runtime.rank_context import RankContext


class LossBroadcast:
    """Broadcasts losses along `pp`. Making it is collective, and so is `share`.

    On a GPU the loss goes from stream to stream, and no host waits for it.
    """

    def __init__(self, context: RankContext) -> None:
        self._device, self._sender = context.device, context.placement[context.last]
        self._world = context.world
        self._group = None if context.world is None else context.world.along(PIPELINE)
        self._dtypes: dict[int, torch.dtype] = {}  # of the loss, by the state of autocast

    def share(self, loss: Tensor | None) -> Tensor | None:
        """Return the loss of the last stage on every rank.

        Args:
            loss: on the rank of the last stage.
        """
        if self._group is None or self._world is None or len(self._group.ranks) == 1:
            return loss
        is_sender = self._group.rank == self._sender
        autocast = autocast_number(self._device.type)
        if autocast not in self._dtypes:
            name = "" if loss is None else str(loss.dtype).removeprefix("torch.")
            texts = dict(zip(self._group.ranks, self._world.gather_text(name), strict=True))
            self._dtypes[autocast] = getattr(torch, texts[self._sender])
        number = torch.empty((), dtype=self._dtypes[autocast], device=self._device)
        if is_sender:
            assert loss is not None, "the last stage computes a loss"
            number.copy_(loss.detach())
        self._group.broadcast(number, self._sender)
        return loss if is_sender else number
