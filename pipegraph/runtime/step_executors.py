"""The executors of a pipeline, for each number of microbatches that its steps have, made when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from pipegraph.errors import ArgumentError, ScheduleError
from pipegraph.runtime.executor import Executor
from pipegraph.runtime.schedule_choice import fewer_microbatches, forward_only, with_microbatches
from pipegraph.schedule import Schedule, lower

Edges = Iterable[tuple[int, int]]


class StepExecutors:
    """Executors by what they do and by the number of microbatches.

    Args:
        schedule: the pipeline's own.
        choice: what it was chosen by.
        processes: how many run it, one per rank; None for one process.
        edges, gradient_edges: (producer stage, consumer stage) pairs that carry values, and gradients.
        make: lowered schedule → the executors of this process.
        collectives: the arguments of `lower` for stages that several ranks hold: sharded, replicated, resident.

    Attributes:
        training: the pipeline's own schedule with its transfers.
    """

    def __init__(
        self,
        schedule: Schedule,
        choice: str | PathLike[str] | Schedule,
        processes: int | None,
        edges: Edges,
        gradient_edges: Edges,
        make: Callable[[Schedule], Sequence[Executor]],
        collectives: Mapping[str, Any] | None = None,
    ) -> None:
        self._pipeline_schedule, self._choice, self._processes = schedule, choice, processes
        self._edges, self._gradient_edges = tuple(edges), tuple(gradient_edges)
        self._make = make
        self._collectives = dict(collectives or {})
        self._built = {schedule.microbatches: schedule}
        self._executors: dict[tuple[bool, int], Sequence[Executor]] = {}
        self.training = lower(schedule, self._edges, self._gradient_edges, **self._collectives)
        self._evaluation = lower(forward_only(schedule), self._edges, (), **self._collectives)

    @property
    def training_executors(self) -> Sequence[Executor]:
        """The executors of a training step of the pipeline's own number of microbatches."""
        count = self._pipeline_schedule.microbatches
        return self.executors(False, count, count)

    def check(self, microbatches: int | None) -> int:
        """Return how many microbatches a step has that is asked to have so many; by default those of the schedule.

        Raises:
            PipegraphError: the schedule cannot have so many.
        """
        if microbatches is None:
            return self._pipeline_schedule.microbatches
        if type(microbatches) is not int or microbatches < 1:
            raise ArgumentError(f"microbatches cannot be {microbatches!r}.\nTry: a whole number from 1 on.")
        self._schedule(microbatches)
        return microbatches

    def executors(self, evaluates: bool, microbatches: int, requested_microbatches: int) -> Sequence[Executor]:
        """Return the executors of a step.

        Args:
            evaluates: whether only the forward runs.
            microbatches: how many the step has.
            requested_microbatches: how many it was asked to have, at least as many.
        """
        key = evaluates, microbatches
        if key not in self._executors:
            self._executors[key] = self._make(self._lowered(evaluates, microbatches, requested_microbatches))
        return self._executors[key]

    def _lowered(self, evaluates: bool, microbatches: int, requested_microbatches: int) -> Schedule:
        if microbatches == self._pipeline_schedule.microbatches:
            return self._evaluation if evaluates else self.training
        try:
            schedule = self._schedule(microbatches)
        except ScheduleError:  # it cannot have so few
            schedule = fewer_microbatches(self._schedule(requested_microbatches), microbatches)
        if evaluates:
            return lower(forward_only(schedule), self._edges, (), **self._collectives)
        return lower(schedule, self._edges, self._gradient_edges, **self._collectives)

    def _schedule(self, microbatches: int) -> Schedule:
        if microbatches not in self._built:
            self._built[microbatches] = with_microbatches(
                self._pipeline_schedule, self._choice, microbatches, self._processes
            )
        return self._built[microbatches]
