"""Orders for a model with branches: each stage has its own rank.

  stage 0 ──▶ stage 1 ──┐
                        ├──▶ stage 4
  stage 2 ──▶ stage 3 ──┘

The number of forwards before the first backward of a stage is the number of stages from it to the end of the model,
not the number of ranks after it (GraphPipe: Jeon et al., arXiv:2406.17145). Stages 0 and 2 hold three activations, and
branches do not wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.stages import Edge, StagesByStage
from pipegraph.schedule.times import Times

NAME = "branches"
"""The name of these schedules."""

Row = list[tuple[Kind, int]]
"""The actions of a rank, each with its microbatch."""


def have_branches(stages: int, edges: Sequence[Edge]) -> bool:
    """Return whether some stages stand side by side: the longest path has fewer stages than there are."""
    return max(stages_to_end(stages, edges)) < stages


def stages_to_end(stages: int, edges: Sequence[Edge]) -> list[int]:
    """Return for each stage how many stages the longest path from it has, the stage itself included.

    Args:
        edges: (producer stage, consumer stage); the consumer is the later stage.
    """
    lengths = [1] * stages
    for producer, consumer in sorted(edges, reverse=True):
        lengths[producer] = max(lengths[producer], lengths[consumer] + 1)
    return lengths


def branch_schedules(
    times: Times, microbatches: int, edges: Sequence[Edge], gradient_edges: Sequence[Edge]
) -> Iterator[Schedule]:
    """Yield the orders for one stage on each rank: with whole backwards, and with weight gradients in the gaps.

    The second one holds no more activations than the first.

    Args:
        times: of each stage.
        microbatches: of a step.
        edges, gradient_edges: between stages, as `Schedule` has them.
    """
    stages = len(times.forward)
    ahead = stages_to_end(stages, edges)
    joined = [_one_forward_one_backward(count, microbatches, Kind.B) for count in ahead]
    divided = [_one_forward_one_backward(count, microbatches, Kind.I) for count in ahead]
    plain = Schedule(
        NAME,
        tuple(range(stages)),
        microbatches,
        _actions(joined),
        edges=tuple(edges),
        gradient_edges=tuple(gradient_edges),
    )
    yield plain
    filled = _Filled(times, plain, divided, ahead)
    yield plain.changed(actions=_actions(filled.rows))


def _actions(rows: Sequence[Row]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action(stage, kind, microbatch) for kind, microbatch in row) for stage, row in enumerate(rows))


def _one_forward_one_backward(ahead: int, microbatches: int, backward: Kind) -> Row:
    """The actions of a stage that runs at most ``ahead`` forwards before its first backward."""
    ahead = min(ahead, microbatches)
    row: Row = [(Kind.F, microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        row.append((backward, microbatch))
        if ahead + microbatch < microbatches:
            row.append((Kind.F, ahead + microbatch))
    return row


class _Filled:
    """Orders of F and I with each W in the first gap after its I.

    Args:
        times: of each stage.
        schedule: with the dependencies of the stages.
        rows: the orders of F and I.
        limits: how many activations each stage holds at most.

    Attributes:
        rows: the orders of F, I and W.
    """

    def __init__(self, times: Times, schedule: Schedule, rows: Sequence[Row], limits: Sequence[int]) -> None:
        self._times, self._limits = times, limits
        needs = schedule.dependencies
        self._producers = {Kind.F: needs.producers, Kind.I: needs.gradient_consumers}
        self._clock = [0.0] * len(rows)
        self._ends: dict[tuple[Kind, int, int], float] = {}
        self._waiting: list[deque[int]] = [deque() for _ in rows]  # microbatches whose W is not run
        self._activations = [0] * len(rows)
        self.rows: list[Row] = [[] for _ in rows]
        remaining = [deque(row) for row in rows]
        while any(remaining):
            for stage, row in enumerate(remaining):
                while row and (ready := self._ready(stage, *row[0])) is not None:
                    self._run(stage, *row.popleft(), ready)
        for stage in range(len(rows)):
            while self._waiting[stage]:
                self._run_weight_grad(stage)

    def _ready(self, stage: int, kind: Kind, microbatch: int) -> float | None:
        """When the values and gradients that an action needs are there; None if an action before it is not run."""
        producers: StagesByStage = self._producers[kind]
        arrivals = [0.0]
        for producer in producers.get(stage, ()):
            end = self._ends.get((kind, producer, microbatch))
            if end is None:
                return None
            edge = (min(stage, producer), max(stage, producer))
            arrivals.append(end + self._times.hop_of(edge) + self._times.transfer_of(edge))
        return max(arrivals)

    def _run(self, stage: int, kind: Kind, microbatch: int, ready: float) -> None:
        duration = self._times.weight_grad[stage]
        waiting = self._waiting[stage]
        is_full = kind is Kind.F and self._activations[stage] == self._limits[stage]
        while waiting and (is_full or self._clock[stage] + duration <= ready):
            self._run_weight_grad(stage)
            is_full = False
        figures = self._times.forward if kind is Kind.F else self._times.input_grad
        self._clock[stage] = max(self._clock[stage], ready) + figures[stage]
        self._ends[kind, stage, microbatch] = self._clock[stage]
        self.rows[stage].append((kind, microbatch))
        if kind is Kind.F:
            self._activations[stage] += 1
        else:
            waiting.append(microbatch)

    def _run_weight_grad(self, stage: int) -> None:
        self.rows[stage].append((Kind.W, self._waiting[stage].popleft()))
        self._clock[stage] += self._times.weight_grad[stage]
        self._activations[stage] -= 1
