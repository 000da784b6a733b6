"""Gradients of parameters in memory that stays in its place, because graphs that add to them are recorded with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipegraph.kernels.module_state import gradient_in_place
from pipegraph.torch_private.tensors import is_held_elsewhere, zero_all

Places = tuple[int, ...]
"""The addresses of gradients"""


class KeptGradients:
    """The memory of gradients, kept for the next step when an optimizer sets `.grad` to None."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}

    def places(self, parameters: Mapping[int, Tensor]) -> Places | None:
        """Give each parameter a `.grad`, zeros if it has none, and return the addresses of the gradients.

        Memory that other code still holds, such as a gradient from before `.grad` was set to None, is not used again.

        Args:
            parameters: by number; a parameter always has the same number.

        Returns:
            None if a gradient cannot be added to in place.
        """
        new = []
        for number, parameter in parameters.items():
            if parameter.grad is None:
                memory = self._memory.get(number)
                if memory is None or is_held_elsewhere(memory):
                    memory = self._memory[number] = torch.empty_like(parameter, requires_grad=False)
                parameter.grad = memory.detach()
                new.append(memory)
        if new:
            zero_all(new)
        gradients = [gradient_in_place(parameter) for parameter in parameters.values()]
        places = tuple(0 if gradient is None else gradient.data_ptr() for gradient in gradients)
        return None if 0 in places else places
