"""What a model returns: the tensors in it, and their loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pipegraph.graph.captured import Captured
from pipegraph.graph.nodes import label_of
from pipegraph.kernels import Loss

LossOf = Callable[[Any, Any], Tensor | tuple[Tensor, dict[str, Tensor]]]
"""(what the model returns, in its own nesting; one microbatch's target) → the loss of no dimensions."""


def default_loss(output: Any, target: Any = None) -> Tensor:
    """The loss of a model without a loss function: the one that it returns.

    Other models have the mean over the mean squares of the floating-point outputs, and 0 without such outputs.
    """
    loss = returned_loss(output)
    if loss is not None:
        return loss
    squares = [
        tensor.float().square().mean() for tensor in output_tensors(output).values() if tensor.is_floating_point()
    ]
    return torch.stack(squares).mean() if squares else torch.zeros(())


def returned_loss(output: Any) -> Tensor | None:
    """The loss among what a model returns: ``output["loss"]``, ``output.loss``, the first of a tuple, or the output.

    It is a floating-point tensor without dimensions. None if the model returns no loss.
    """
    if isinstance(output, dict):
        loss = output.get("loss")
    elif isinstance(output, (list, tuple)):
        loss = getattr(output, "loss", output[0] if output else None)
    else:
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point() else None


def output_tensors(structure: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors in nested dicts, sequences and dataclasses, under their paths: ``{"hidden.0": …}``."""
    if isinstance(structure, Tensor):
        return {path: structure}
    if isinstance(structure, dict):
        items = [(str(key), item) for key, item in structure.items()]
    elif isinstance(structure, (list, tuple)):
        items = [(str(index), item) for index, item in enumerate(structure)]
    elif is_dataclass(structure):
        items = [(field.name, getattr(structure, field.name)) for field in fields(structure)]
    else:
        return {}
    tensors: dict[str, Tensor] = {}
    for key, item in items:
        tensors |= output_tensors(item, f"{path}.{key}" if path else key)
    return tensors


def loss_of_pieces(captured: Captured, function: LossOf) -> Loss:
    """Return a loss of the last piece's outputs, which puts them together as the model returns them."""
    names = [label_of(node) for node in captured.returned]

    def loss(outputs: tuple[Tensor, ...], target: Any) -> Any:
        values = dict(zip(names, outputs, strict=True))
        return function(_filled(captured.outputs, values), target)

    return loss


def _filled(structure: Any, values: dict[str, Tensor]) -> Any:
    if isinstance(structure, dict):
        return {key: _filled(item, values) for key, item in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)(_filled(item, values) for item in structure)
    return None if structure is None else values[structure]
