"""`loss_over="batch"`: the loss is evaluated once, on the outputs of all microbatches.

F0 … Fm of the last stage ─▶ outputs joined along their rows ─▶ loss_fn(outputs, whole target)
                                                                      │ backward
B0 … Bm of the last stage ◀── the gradient of each microbatch's outputs ◀┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipegraph import schedule as schedules
from pipegraph.errors import BatchError, ScheduleError
from pipegraph.kernels import Loss
from pipegraph.kernels.loss import compute_loss, explained_without_target
from pipegraph.package import Value
from pipegraph.runtime.step_state import StepOutputs
from pipegraph.schedule import Kind, Schedule
from pipegraph.schedule.build import schedule_for_stages

Join = Callable[[Sequence[Any], int | None], Any]
"""(one output of all microbatches, its batch dimension) → the output of the batch"""

JoinTarget = Callable[[Sequence[Any]], Any]
"""(targets of all microbatches) → the target of the batch"""


class BatchLoss:
    """The loss of one step over the whole batch, on the rank of the last stage.

    Args:
        loss: of the last stage's outputs.
        values: the outputs of the last stage.
        targets: of each microbatch.
        join, join_target: join an output, and the target.
        differentiable: whether a backward follows.
    """

    def __init__(
        self,
        loss: Loss,
        values: Sequence[Value],
        targets: Sequence[Any],
        join: Join,
        join_target: JoinTarget,
        differentiable: bool,
    ) -> None:
        self._loss, self._values, self._targets = loss, values, targets
        self._join, self._join_target = join, join_target
        self._differentiable = differentiable
        self._outputs: dict[int, tuple[Any, ...]] = {}
        self._results: StepOutputs | None = None

    def add(self, microbatch: int, outputs: Sequence[Any], results: StepOutputs) -> None:
        """Add the outputs of a microbatch, and evaluate the loss after the last one."""
        self._outputs[microbatch] = tuple(map(self._leaf, outputs))
        if len(self._outputs) == len(self._targets):
            self._evaluate(results)

    def gradients(self, microbatch: int) -> list[Tensor | None]:
        """The gradient of the loss with respect to each output of a microbatch. Called once for each."""
        return [output.grad if isinstance(output, Tensor) else None for output in self._outputs.pop(microbatch)]

    def _leaf(self, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        needs_gradient = self._differentiable and (output.is_floating_point() or output.is_complex())
        return output.detach().requires_grad_(needs_gradient)

    def _evaluate(self, results: StepOutputs) -> None:
        target = self._join_target(self._targets)
        with torch.set_grad_enabled(self._differentiable), explained_without_target(target):
            by_output = zip(*(self._outputs[at] for at in range(len(self._targets))), strict=True)
            pairs = zip(self._values, by_output, strict=True)
            outputs = tuple(self._join(parts, value.batch_dim) for value, parts in pairs)
            loss, metrics = compute_loss(self._loss, outputs, target)
            if self._differentiable:
                loss.backward()
                self._check_numbers()
        for microbatch in range(len(self._targets)):  # the mean over microbatches is the loss of the batch
            results.add_loss(microbatch, loss.detach(), metrics)

    def _check_numbers(self) -> None:
        """Raise BatchError if the loss depends on a number that the model returns for each microbatch."""
        for place, value in enumerate(self._values):
            numbers = [outputs[place] for outputs in self._outputs.values()]
            is_number = isinstance(numbers[0], Tensor) and numbers[0].dim() == 0
            if is_number and numbers[0].grad is not None and any(not torch.equal(numbers[0], item) for item in numbers):
                raise BatchError(
                    f'loss_over="batch" cannot take {value.name}, which the model computes for each microbatch alone.\n'
                    "Try: a loss_fn of the outputs that have rows, such as logits and the target."
                )


def require_forwards_first(schedule: Schedule) -> None:
    """Raise ScheduleError unless the last stage runs all forwards before its first backward."""
    if forwards_first(schedule):
        return
    fitting = []
    for name in schedules.names():
        try:
            candidate = schedule_for_stages(name, schedule.stages, schedule.microbatches, schedule.ranks)
        except ScheduleError:
            continue
        if candidate.ranks == schedule.ranks and candidate.trains and forwards_first(candidate):
            fitting.append(name)
    raise ScheduleError(
        f'loss_over="batch" needs the outputs of all {schedule.microbatches} microbatches before the first backward, '
        f"and the last stage begins its backwards earlier under {schedule.name}.\n"
        f"Try: {', '.join(fitting) or 'gpipe'}."
    )


def forwards_first(schedule: Schedule) -> bool:
    """Return whether the last stage runs all its forwards before its first backward."""
    last = schedule.stages - 1
    kinds = [
        action.kind
        for action in schedule.actions[schedule.placement[last]]
        if action.stage == last and not action.kind.is_transfer
    ]
    first_backward = next((at for at, kind in enumerate(kinds) if kind is not Kind.F), len(kinds))
    return Kind.F not in kinds[first_backward:]
