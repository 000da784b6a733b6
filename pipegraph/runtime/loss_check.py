"""The check of the first step that a loss is what the pipeline takes it for: a mean over rows, or a sum.

    rows of a microbatch   a a a │ b b b        a mean: loss(a b) = (rows(a) · loss(a) + rows(b) · loss(b)) / rows
                                                a sum:  loss(a b) = loss(a) + loss(b)

A contrastive loss is neither, nor is the mean over tokens that are not masked, unless each row has equally many.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from pipegraph import schedule as schedules
from pipegraph.device import Device
from pipegraph.errors import BatchError, ScheduleError
from pipegraph.kernels import Loss
from pipegraph.kernels.loss import compute_loss, divide_loss, explained_without_target, objects_held_by
from pipegraph.kernels.sharded import is_sharded
from pipegraph.kernels.trace_guard import unchanged
from pipegraph.package import Manifest, Value
from pipegraph.package.sizes import BATCH
from pipegraph.runtime.batch import cut_target, join_target
from pipegraph.runtime.loss_reduction import LossReduction
from pipegraph.runtime.step_state import StepOutputs
from pipegraph.schedule import Kind, Schedule
from pipegraph.schedule.build import schedule_for_stages
from pipegraph.torch_private.pytrees import pytree
from pipegraph.torch_private.tensors import version_of

# ---- batch loss ------------------------------------------------------------------------------------------------------
# `loss_over="batch"`: the loss is evaluated once, on the outputs of all microbatches.
#
# F0 … Fm of the last stage ─▶ outputs joined along their rows ─▶ loss_fn(outputs, whole target)
#                                                                       │ backward
# B0 … Bm of the last stage ◀── the gradient of each microbatch's outputs ◀┘


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
                    f'loss_over="batch" cannot take {value.name}, which the model computes for each microbatch alone.',
                    "a loss_fn of the outputs that have rows, such as logits and the target.",
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
        f"and the last stage begins its backwards earlier under {schedule.name}.",
        f"{', '.join(fitting) or 'gpipe'}.",
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


# ---- loss check ------------------------------------------------------------------------------------------------------


_ROUNDING: Final = 1e-4
"""Relative. What differs by more is computed again with float64, in which rounding is out of the question."""
_ROUNDING_OF_DOUBLES: Final = 1e-6  # of a loss that casts to float32

_LARGEST_STATE: Final = 2**16
"""Elements of a tensor that a loss may count in. A larger one, such as a table, is not copied."""


class _Part(NamedTuple):
    """Rows of a microbatch: outputs of the last stage, their target, and how many rows they are."""

    outputs: tuple[Any, ...]
    target: Any
    rows: int


class LossCheck:
    """Compares the loss of each microbatch with the losses of its parts, in the first training step.

    The first rows of two microbatches are compared together as well, also if they have no other rows. Losses that draw
    random numbers, or cannot be evaluated on fewer rows, are not compared.

    Args:
        manifest: of the package.
        stage: the last one, as a module.
        loss: of its outputs.
        reduction: what the pipeline takes the loss for.
        target_dims: along which a target may have its rows.
    """

    def __init__(
        self, manifest: Manifest, stage: nn.Module, loss: Loss, reduction: LossReduction, target_dims: Sequence[int]
    ) -> None:
        self._target_dims = target_dims
        last = manifest.stages[-1]
        self._inputs = [manifest.values[name] for name in last.inputs]
        self._outputs = [manifest.values[name] for name in last.outputs]
        self._batch, self._stage, self._loss = manifest.batch, stage, loss
        self._is_sum = reduction.sums or reduction.weight_of is not None
        self._row: _Part | None = None
        self._problem: tuple[float, float] | None = None
        self.is_done = False

    def add(self, inputs: Sequence[Any], outputs: Sequence[Any], target: Any, sizes: Mapping[str, int]) -> None:
        """Compare a microbatch."""
        rows = self._rows(outputs, sizes)
        if self.is_done or self._problem is not None or rows is None:
            return
        microbatch = _Part(tuple(outputs), target, rows)
        with torch.no_grad(), _device_of(outputs).fork_rng(), self._state_kept():
            for part, parts in self._comparisons(microbatch, inputs):
                if self._problem is not None or self._writes_to_outputs(parts[0]):
                    return
                with suppress(Exception):  # the loss may need more rows
                    self._compare(part, parts)

    def finish(self) -> None:
        """End the check after a step. Raises BatchError if a loss differed."""
        self.is_done, self._row = True, None
        if self._problem is None:
            return
        loss, of_parts = self._problem
        kind, rule = ("sum", "sum") if self._is_sum else ("mean over rows", "mean, weighted by rows,")
        raise BatchError(
            f"loss_fn is not a {kind}: it is {loss:.6g} for a microbatch, and the {rule} of its parts is "
            f"{of_parts:.6g}. The loss of the step would depend on how the batch is cut.",
            "loss_weight=, with a loss_fn that returns a sum over the items that count, such as tokens that are "
            'not masked; loss_over="batch", for a loss that compares rows with one another; or '
            'loss_over="microbatch", to accept the loss of each microbatch as it is.',
        )

    def _rows(self, outputs: Sequence[Any], sizes: Mapping[str, int]) -> int | None:
        """The rows of a microbatch; None if its outputs have none."""
        if BATCH in sizes:
            return sizes[BATCH]
        lengths = [
            output.shape[value.batch_dim]
            for value, output in zip(self._outputs, outputs, strict=True)
            if isinstance(output, Tensor) and value.batch_dim is not None
        ]
        return min(lengths, default=None)

    def _comparisons(self, microbatch: _Part, inputs: Sequence[Any]) -> Iterator[tuple[_Part, list[_Part]]]:
        """Rows, and the parts that they consist of.

        A row and the other rows tell more than halves do, in which equally many tokens may be masked.
        """
        outputs = [tensor for tensor in microbatch.outputs if isinstance(tensor, Tensor)]
        of_stage = any(
            tensor.dim() == 0 and tensor.is_floating_point() for tensor in outputs
        )  # may be the model's loss
        if of_stage and not self._has_independent_rows():
            return
        row = microbatch
        for first in sorted({1, (microbatch.rows + 1) // 2} - {microbatch.rows}):
            with suppress(Exception):  # nor does the stage, or the target cannot be cut
                batch, parts = (
                    self._of_stage(microbatch, inputs, first) if of_stage else self._of_outputs(microbatch, first)
                )
                row = parts[0] if first == 1 else row
                yield batch, parts
        if of_stage or row.rows > 1:
            return
        with suppress(Exception):
            if self._row is not None:
                yield self._joined(self._row, row), [self._row, row]
        self._row = self._row or _Part(tuple(map(_copied, row.outputs)), row.target, 1)

    def _joined(self, first: _Part, second: _Part) -> _Part:
        pairs = zip(self._outputs, zip(first.outputs, second.outputs, strict=True), strict=True)
        outputs = [
            torch.cat(pair, value.batch_dim) if isinstance(pair[0], Tensor) and value.batch_dim is not None else pair[0]
            for value, pair in pairs
        ]
        target = join_target([first.target, second.target], {first.rows + second.rows}, self._target_dims)
        return _Part(tuple(outputs), target, first.rows + second.rows)

    def _of_outputs(self, microbatch: _Part, first: int) -> tuple[_Part, list[_Part]]:
        """The rows of a microbatch, and its first rows and the others."""
        return microbatch, self._halves(
            microbatch, self._cut(self._outputs, microbatch.outputs, microbatch.rows, first), first
        )

    def _has_independent_rows(self) -> bool:
        """Whether rows are known not to mix in the last stage, which this rank can run alone."""
        by_design = [operator for operator in self._batch.per_microbatch if operator.result == "rows"]
        mixes = not self._batch.proof or by_design or self._batch.mixing
        return not mixes and not any(is_sharded(parameter) for parameter in self._stage.parameters())

    def _of_stage(self, microbatch: _Part, inputs: Sequence[Any], first: int) -> tuple[_Part, list[_Part]]:
        """The same from a run of the last stage. Raises RuntimeError if it changes its buffers."""
        values = [buffer.clone() for buffer in self._stage.buffers()]
        halves = self._cut(self._inputs, inputs, microbatch.rows, first)
        returned = [self._stage(*copy.deepcopy(tuple(map(_detached, half)))) for half in (tuple(inputs), *halves)]
        if not all(map(torch.equal, values, self._stage.buffers())):
            for buffer, value in zip(self._stage.buffers(), values, strict=True):
                buffer.copy_(value)
            raise RuntimeError("the stage depends on the number of its calls")
        outputs = [tuple(result) if isinstance(result, (tuple, list)) else (result,) for result in returned]
        return _Part(outputs[0], microbatch.target, microbatch.rows), self._halves(microbatch, outputs[1:], first)

    def _cut(self, values: Sequence[Value], tensors: Sequence[Any], rows: int, first: int) -> list[list[Any]]:
        """Split tensors into the first rows and the rest. Raises ValueError if a tensor is not divisible into rows."""
        halves: list[list[Any]] = [[], []]
        for value, tensor in zip(values, tensors, strict=True):
            dim = value.batch_dim
            if not isinstance(tensor, Tensor) or dim is None:
                pair = tensor, tensor
            elif tensor.shape[dim] % rows:
                raise ValueError(f"{value.name} has {tensor.shape[dim]} entries for {rows} rows")
            else:
                entries = tensor.shape[dim] // rows
                pair = tensor.split([first * entries, (rows - first) * entries], dim)
            for half, part in zip(halves, pair, strict=True):
                half.append(part)
        return halves

    def _halves(self, microbatch: _Part, outputs: Sequence[Sequence[Any]], first: int) -> list[_Part]:
        """The halves of a microbatch with these outputs, of which one has the first rows."""
        lengths = {microbatch.rows: [first, microbatch.rows - first]}
        for value, output in zip(self._outputs, microbatch.outputs, strict=True):
            if isinstance(output, Tensor) and value.batch_dim is not None:
                length = output.shape[value.batch_dim]
                lengths[length] = [first * length // microbatch.rows, length - first * length // microbatch.rows]
        targets = cut_target(microbatch.target, 2, None, lengths, dims=self._target_dims)
        rows = first, microbatch.rows - first
        return [_Part(tuple(half), target, count) for half, target, count in zip(outputs, targets, rows, strict=True)]

    def _compare(self, microbatch: _Part, parts: Sequence[_Part]) -> None:
        """Note a problem if the loss of all rows does not follow from those of the parts."""
        device = _device_of(microbatch.outputs)
        states = _random_states(device)
        loss = self._value(microbatch)
        if not all(map(torch.equal, states, _random_states(device))):
            return  # it draws random numbers
        losses = self._combined(microbatch, parts)
        if not _differ(loss, losses, _ROUNDING):
            return
        try:
            doubles = _double(microbatch), [_double(part) for part in parts]
            loss, losses = self._value(doubles[0]), self._combined(*doubles)
        except Exception:  # the loss takes its own dtype alone
            is_problem = _differ(loss, losses, 10 * _ROUNDING)
        else:
            is_problem = _differ(loss, losses, _ROUNDING_OF_DOUBLES)
        if is_problem:
            self._problem = loss, losses[0]

    def _writes_to_outputs(self, part: _Part) -> bool:
        """Whether the loss changes what it is given, which the backward may read."""
        copies = tuple(map(_copied, part.outputs))
        versions = [version_of(tensor) for tensor in copies if isinstance(tensor, Tensor)]
        with suppress(Exception):
            self._value(part._replace(outputs=copies))
        return versions != [version_of(tensor) for tensor in copies if isinstance(tensor, Tensor)]

    @contextmanager
    def _state_kept(self) -> Iterator[None]:
        """A context after which what the loss counts, or collects, is as before."""
        objects = [item for item in objects_held_by(self._loss) if not isinstance(item, nn.Module)]
        tensors = [item for item in objects if isinstance(item, Tensor) and item.numel() <= _LARGEST_STATE]
        copies = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in tensors]
        with suppress(RuntimeError), unchanged([item for item in objects if not isinstance(item, Tensor)]):
            yield
        for tensor, version, copy_of in copies:
            if version_of(tensor) != version:
                tensor.detach().copy_(copy_of)

    def _combined(self, microbatch: _Part, parts: Sequence[_Part]) -> tuple[float, float]:
        """What the losses of the parts come to, and the largest of them."""
        losses = [self._value(part) for part in parts]
        weights = [1.0 if self._is_sum else part.rows / microbatch.rows for part in parts]
        largest = max(map(abs, losses))
        return math.fsum(weight * loss for weight, loss in zip(weights, losses, strict=True)), largest

    def _value(self, part: _Part) -> float:
        # A loss may write to its target, and a backward may read that.
        return float(divide_loss(self._loss(part.outputs, pytree.tree_map(_copied, part.target)))[0])


def _differ(loss: float, losses: tuple[float, float], tolerance: float) -> bool:
    combined, largest = losses
    if not math.isfinite(loss):
        return False
    # The mean over no token at all is nan.
    return not math.isfinite(largest) or abs(loss - combined) > tolerance * max(abs(loss), largest)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _double(part: _Part) -> _Part:
    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return _Part(tuple(map(double, part.outputs)), pytree.tree_map(double, part.target), part.rows)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _device_of(outputs: Sequence[Any]) -> Device:
    """The device of the first tensor; the CPU without one."""
    return Device(next((output.device for output in outputs if isinstance(output, Tensor)), "cpu"))


def _random_states(device: Device) -> list[Tensor]:
    states = torch.get_rng_state(), device.rng_state()
    return [state for state in states if state is not None]
