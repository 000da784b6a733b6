"""What a stage and its loss are traced for, compared before each step with what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pipegraph.kernels import internals
from pipegraph.kernels.interface import Loss
from pipegraph.kernels.loss import objects_held_by
from pipegraph.kernels.modules.module_state import ModuleState
from pipegraph.kernels.modules.signature import tensor_signature
from pipegraph.kernels.sharded import check_traceable, local


class TraceGuard:
    """Looks at a stage and its loss once per step.

    Attributes:
        held: what tracing must leave as it is: all modules, and what else the loss reads.
        state: the parameters and buffers of all modules.
        key: what can change and change back: modes, dtypes, shapes, `requires_grad`, and the obstacle.
        obstacle: why stage and loss cannot be traced, or None.
    """

    def __init__(self, stage: nn.Module, loss: Loss | None) -> None:
        self._stage, self._loss = stage, loss
        self._of_modules: Any = None
        self._of_tensors: Any = None
        self.look()

    def look(self) -> str | None:
        """Compare with the last look.

        Returns:
            "modules" if a module is another object, or has other hooks; "tensors" if only parameters, buffers or
            tensors that the loss holds are other objects; else None.
        """
        read = objects_held_by(self._loss)
        loss_modules = (part for each in read if isinstance(each, nn.Module) for part in each.modules())
        modules = list(dict.fromkeys((*self._stage.modules(), *loss_modules)))
        tensors = [tensor for module in modules for held in internals.tensor_dicts(module) for tensor in held.values()]
        tensors += [each for each in read if isinstance(each, Tensor)]
        of_modules = tuple(map(id, modules)), tuple(map(internals.hook_numbers, modules))
        of_tensors = tuple(map(id, tensors))
        changed = None
        if of_modules != self._of_modules:
            changed = "modules"
        elif of_tensors != self._of_tensors:
            changed = "tensors"
        if changed is not None:
            self.state = ModuleState(modules)
        self._of_modules, self._of_tensors = of_modules, of_tensors
        self._alive = modules, tensors  # until the next look: no other object gets the identity of one of them
        self.held = [*modules, *(each for each in read if not isinstance(each, (nn.Module, Tensor)))]
        state = self.state.tensors()
        self.obstacle = _obstacle(modules, state)
        modes = tuple(module.training for module in modules)
        self.key = modes, tuple(map(tensor_signature, state)), self.obstacle
        return changed


def _obstacle(modules: Sequence[nn.Module], state: Sequence[Tensor]) -> str | None:
    try:
        check_traceable(modules, state)
        for tensor in state:
            _check_plain(tensor)
    except RuntimeError as error:
        return str(error)
    return None


def _check_plain(tensor: Tensor) -> None:
    """Raise RuntimeError if a tensor has a class of its own or a hook: graphs hold plain tensors, and only autograd
    calls hooks of parameters."""
    if type(local(tensor)) not in (Tensor, nn.Parameter, nn.Buffer):
        raise RuntimeError(f"a parameter or buffer is a {type(tensor).__name__}")
    if internals.has_hooks(tensor):
        raise RuntimeError(f"a parameter of shape {list(tensor.shape)} has a hook")
