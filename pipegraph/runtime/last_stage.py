"""What the rank of the last stage gives to all ranks of its pipeline: the loss of a step, and the model's outputs."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from pipegraph.errors import PipegraphError
from pipegraph.kernels.autocast import autocast_number
from pipegraph.runtime.processes.rank_grid import PIPELINE
from pipegraph.runtime.rank_context import RankContext
from pipegraph.torch_private.pytrees import pytree


class LastStageBroadcast:
    """Broadcasts from the rank of the last stage along `pp`. Making it is collective, and so are its methods.

    On a GPU the loss goes from stream to stream; its dtype, and the shapes of outputs, go from host to host.
    """

    def __init__(self, context: RankContext) -> None:
        self._device, self._sender = context.device, context.placement[context.last]
        self._world = context.world
        group = None if context.world is None else context.world.along(PIPELINE)
        self._group = None if group is None or len(group.ranks) == 1 else group
        self._loss_dtypes: dict[int, torch.dtype] = {}  # by the state of autocast

    def loss(self, loss: Tensor | None) -> Tensor | None:
        """Return the loss of the last stage on every rank.

        Args:
            loss: on the rank of the last stage.
        """
        if self._group is None:
            return loss
        autocast = autocast_number(self._device.type)
        if autocast not in self._loss_dtypes:
            self._loss_dtypes[autocast] = getattr(torch, self._text("" if loss is None else _dtype_name(loss)))
        return self._tensor(loss, (), self._loss_dtypes[autocast])

    def outputs(self, outputs: Any) -> Any:
        """Return the outputs of the last stage on every rank: tensors and plain values in tuples, lists and dicts.

        Args:
            outputs: on the rank of the last stage.
        """
        if self._group is None:
            return outputs
        is_sender = self._group.rank == self._sender
        leaves, spec = pytree.tree_flatten(outputs)
        text = ""
        if is_sender:
            described = [
                {"dtype": _dtype_name(leaf), "shape": list(leaf.shape)} if isinstance(leaf, Tensor) else {"value": leaf}
                for leaf in leaves
            ]
            text = json.dumps([pytree.treespec_dumps(spec), described])
        spec_text, described = json.loads(self._text(text))
        tensors = leaves if is_sender else [None] * len(described)
        values = [
            self._tensor(leaf, entry["shape"], getattr(torch, entry["dtype"])) if "shape" in entry else entry["value"]
            for leaf, entry in zip(tensors, described, strict=True)
        ]
        return pytree.tree_unflatten(values, pytree.treespec_loads(spec_text))

    def _text(self, text: str) -> str:
        """The text of the last stage's rank."""
        assert self._world is not None and self._group is not None
        return dict(zip(self._group.ranks, self._world.gather_text(text), strict=True))[self._sender]

    def _tensor(self, tensor: Tensor | None, shape: Any, dtype: torch.dtype) -> Tensor:
        """The tensor of the last stage's rank, which has this shape and dtype."""
        assert self._group is not None
        if self._group.rank == self._sender:
            if tensor is None:
                raise PipegraphError("the last stage has nothing to broadcast.")
            sent = tensor.detach().contiguous()
            self._group.broadcast(sent, self._sender)
            return tensor
        received = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self._group.broadcast(received, self._sender)
        return received


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
