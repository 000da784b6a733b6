"""Compare training and evaluation mode by running a model without memory.

That takes a fraction of the time of a second export, which shows the first difference.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pipegraph.graph.export.operation_record import operations_of_model


def same_in_both_modes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether both modes run the same operations on the same arguments; False also if a mode cannot be run.

    The model is left as it was.
    """
    modes = (dict.fromkeys(model.modules(), training) for training in (True, False))
    try:
        training, evaluation = (operations_of_model(model, mode, args, kwargs) for mode in modes)
    except Exception:  # whatever the model raises on tensors without values
        return False
    return training == evaluation
