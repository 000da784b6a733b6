"""How a stage and its loss stand before a step: whatever they are traced for, beside the arguments of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pipegraph.kernels.interface import Loss
from pipegraph.kernels.modules.attribute_snapshot import AttributeSnapshot
from pipegraph.kernels.modules.module_state import ModuleState
from pipegraph.kernels.modules.signature import loss_signature, module_signature, tensor_signature
from pipegraph.kernels.sharded import check_traceable, local


class TraceGuard:
    """Looked at once per step.

    `modules` are those of stage and loss, `held` these and the lists, dicts and sets that the loss reads, `state` the
    tensors of modules; `tensors` is what these are like, `values` everything else: attributes, modes, hooks, what the
    loss reads from outside. `obstacle` is why they cannot be traced.
    """

    def __init__(self, stage: nn.Module, loss: Loss | None) -> None:
        self._stage, self._loss = stage, loss
        self._before: AttributeSnapshot | None = None
        self._of_loss: list[Any] = []
        self._structure: Any = None
        self.look()

    def look(self) -> None:
        """See what has changed."""
        loss, of_loss = loss_signature(self._loss)
        if self._has_changed(of_loss):
            roots = (self._stage, *(each for each in of_loss if isinstance(each, nn.Module)))
            self.modules = list(dict.fromkeys(part for root in roots for part in root.modules()))
            self.held = [*self.modules, *(each for each in of_loss if not isinstance(each, nn.Module))]
            self.state = ModuleState(self.modules)
            self._of_loss, self._before = of_loss, AttributeSnapshot(self.held)
            self._structure = module_signature(self._stage)
        state = self.state.tensors()
        self.tensors = tuple(map(tensor_signature, state))
        self.obstacle = _obstacle(self.modules, state)
        self.values = self._structure, loss, self.obstacle

    def _has_changed(self, of_loss: list[Any]) -> bool:
        """Asked first, as the signature of many modules takes milliseconds."""
        if self._before is None or self._before.changed() is not None:
            return True
        return list(map(id, of_loss)) != list(map(id, self._of_loss))


def _obstacle(modules: Sequence[nn.Module], state: Sequence[Tensor]) -> str | None:
    try:
        check_traceable(modules, state)
        _check_plain(state)
    except RuntimeError as error:
        return str(error)
    return None


def _check_plain(state: Sequence[Tensor]) -> None:
    """Hooks of parameters are called by autograd alone, and a graph holds tensors that have no class of their own."""
    for tensor in state:
        if type(local(tensor)) not in (Tensor, nn.Parameter, nn.Buffer):
            raise RuntimeError(f"a parameter or buffer is a {type(tensor).__name__}")
        # There is no public way to ask for hooks.
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise RuntimeError(f"a parameter of shape {list(tensor.shape)} has a hook")
