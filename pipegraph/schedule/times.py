"""How long the actions of a schedule take."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipegraph.arguments import require_type
from pipegraph.errors import ScheduleError, nearest
from pipegraph.schedule.action import Action, Collective, CollectiveKind, Kind
from pipegraph.schedule.stages import Edge

PerBoundary = float | Sequence[float] | Mapping[Edge, float]
"""One figure for all boundaries, one per boundary (stage s to s + 1), or one per (producer, consumer) edge."""

TIMES_FORM = '{"forward": [1.0, 1.0], "input_grad": [1.0, 1.0], "weight_grad": [1.0, 1.0], "hop": 0.0}'

PerStage = float | Sequence[float]
"""One figure for all stages, or one per stage."""

_LONGEST = 1e15  # seconds: some million years; sums of much longer times would overflow
_PER_STAGE = ("forward", "input_grad", "weight_grad")
_PER_BOUNDARY = ("hop", "transfer")
_COLLECTIVE = ("unshard", "reduce_grad")
_ONE_OR_EACH = (*_COLLECTIVE, "offload")


@dataclass(frozen=True)
class Times:
    """Seconds for one microbatch: F, I and W of each stage, and transfers between ranks; and for collectives.

    A value made at time t on another rank can be used at t + ``transfer`` + ``hop``. A gradient takes as long as its
    value. Transfers take no time of the ranks themselves. An edge that skips stages takes the largest figure of the
    boundaries it passes, unless a mapping has a figure for the edge.

    Attributes:
        forward, input_grad, weight_grad: one figure per stage.
        hop: the latency of a link, on which any number of transfers may be under way at once.
        transfer: how long a transfer occupies its link, bytes ÷ bandwidth. Of the transfers from one rank to another,
            each starts when the one before has left.
        unshard, reduce_grad: how long a stage's parameters take to be gathered, and its gradients to be reduced; one
            figure per stage, or one for all.
        offload: how long it takes to copy the saved values of F to CPU memory, or back, likewise; 0 if they stay.

    Raises ScheduleError for figures that are negative or not numbers, and for counts that do not fit together.
    """

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    hop: PerBoundary = 0.0
    transfer: PerBoundary = 0.0
    unshard: PerStage = 0.0
    reduce_grad: PerStage = 0.0
    offload: PerStage = 0.0

    def __post_init__(self) -> None:
        for name in _PER_STAGE:
            object.__setattr__(self, name, _figures(name, getattr(self, name)))
        if not self.forward:
            raise ScheduleError("Times hold one figure per stage, and a schedule has 1 stage or more.")
        for name in _PER_STAGE[1:]:
            if (count := len(getattr(self, name))) != self.stages:
                raise ScheduleError(
                    f"Times hold one figure per stage: forward has {self.stages}, and {name} has {count}."
                )
        for name in _PER_BOUNDARY:
            object.__setattr__(self, name, _boundaries(name, getattr(self, name), self.stages))
        for name in _ONE_OR_EACH:
            object.__setattr__(self, name, _stages(name, getattr(self, name), self.stages))

    @classmethod
    def equal(
        cls,
        stages: int,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        hop: PerBoundary = 0.0,
        transfer: PerBoundary = 0.0,
        unshard: float = 0.0,
        reduce_grad: float = 0.0,
    ) -> Times:
        """Return the same figures for every stage."""
        if type(stages) is not int or stages < 1:
            raise ScheduleError(f"Times are for 1 stage or more, not {stages!r}.")
        computing = (forward,) * stages, (input_grad,) * stages, (weight_grad,) * stages
        return cls(*computing, hop, transfer, unshard, reduce_grad)

    @classmethod
    def from_json(cls, text: str) -> Times:
        """Read ``{"forward": [1.0, …], "input_grad": […], "weight_grad": […], "hop": 0.1, "transfer": 0.0}``.

        ``hop``, ``transfer``, ``unshard``, ``reduce_grad`` and ``offload`` are optional, and one figure or a list.
        Raises ScheduleError.
        """
        try:
            fields = json.loads(text, object_pairs_hook=_once)
        except ValueError as error:
            raise ScheduleError(f"These times are no JSON: {error}.") from None
        except RecursionError:
            raise ScheduleError("These times are nested too deeply.") from None
        if not isinstance(fields, dict):
            raise ScheduleError(f"Times in JSON are an object with one figure per stage, such as {TIMES_FORM}.")
        names = [*_PER_STAGE, *_PER_BOUNDARY, *_ONE_OR_EACH]
        for name in fields:
            if name not in names:
                raise ScheduleError(f'Times have no "{name}".{nearest(name, names)} They have {", ".join(names)}.')
        for name in _PER_STAGE:
            if name not in fields:
                raise ScheduleError(f'These times lack "{name}": they look like {TIMES_FORM}.')
        return cls(**fields)

    @property
    def stages(self) -> int:
        return len(self.forward)

    def of(self, action: Action) -> float:
        """Return how long an action keeps its rank busy: B as long as I and W together, a transfer not at all."""
        stage = action.stage
        match action.kind:
            case Kind.F:
                return self.forward[stage]
            case Kind.I:
                return self.input_grad[stage]
            case Kind.W:
                return self.weight_grad[stage]
            case Kind.B:
                return self.input_grad[stage] + self.weight_grad[stage]
        return 0.0

    def offload_of(self, stage: int) -> float:
        """Return how long a copy of what a microbatch of a stage has saved takes."""
        return _of_stage(self.offload, stage)

    def of_collective(self, collective: Collective) -> float:
        """Return how long a collective keeps its stream busy: a RESHARD not at all."""
        match collective.kind:
            case CollectiveKind.UNSHARD:
                return _of_stage(self.unshard, collective.stage)
            case CollectiveKind.REDUCE_GRAD:
                return _of_stage(self.reduce_grad, collective.stage)
        return 0.0

    def hop_of(self, edge: Edge) -> float:
        """Return the latency of an edge between two ranks."""
        return _of_edge("hop", self.hop, edge)

    def transfer_of(self, edge: Edge) -> float:
        """Return how long a value of this edge occupies its link."""
        return _of_edge("transfer", self.transfer, edge)


def require_times(function: str, times: object) -> None:
    """Raise ScheduleError unless a function is given Times."""
    unit = "Times.equal(stages), which has unit times"
    require_type(times, Times, f"{function}() takes the Times of stages", unit, ScheduleError)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object. Raises ScheduleError if a name occurs twice, because one value would be lost."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == second_name for second_name, _ in pairs) > 1)
        raise ScheduleError(f'These times have "{twice}" twice.')
    return fields


def _figures(name: str, figures: Any) -> tuple[float, ...]:
    if isinstance(figures, str | bytes | Mapping) or not isinstance(figures, Iterable):
        raise ScheduleError(f"{name} holds seconds, one figure per stage, and not {figures!r}.")
    return tuple(_figure(name, figure) for figure in figures)


def _figure(name: str, figure: Any) -> float:
    number = isinstance(figure, int | float) and not isinstance(figure, bool)
    if not number or not 0 <= figure <= _LONGEST:  # which NaN and infinity are not
        raise ScheduleError(f"{name} holds seconds from 0 on, and not {figure!r}.")
    return float(figure)


def _boundaries(name: str, figures: Any, stages: int) -> PerBoundary:
    if isinstance(figures, Mapping):
        return {_edge(name, edge, stages): _figure(name, figure) for edge, figure in figures.items()}
    if not isinstance(figures, Iterable) or isinstance(figures, str | bytes):
        return _figure(name, figures)
    values = _figures(name, figures)
    if len(values) != stages - 1:
        raise ScheduleError(
            f"{name} is one figure, or one per boundary: {stages} stages have {stages - 1}, "
            f"and {len(values)} were given."
        )
    return values


def _stages(name: str, figures: Any, stages: int) -> PerStage:
    if not isinstance(figures, Iterable) or isinstance(figures, str | bytes):
        return _figure(name, figures)
    values = _figures(name, figures)
    if len(values) != stages:
        raise ScheduleError(
            f"{name} is one figure, or one per stage: there are {stages}, and {len(values)} were given."
        )
    return values


def _edge(name: str, edge: Any, stages: int) -> Edge:
    match edge:
        case (int(producer), int(consumer)) if 0 <= producer < consumer < stages:
            return producer, consumer
    raise ScheduleError(
        f"{name} by edge has (producer stage, consumer stage) as keys, such as (0, 1), not {edge!r}: "
        f"there are {stages} stages."
    )


def _of_stage(figures: PerStage, stage: int) -> float:
    return figures[stage] if isinstance(figures, Sequence) else figures


def _of_edge(name: str, figures: PerBoundary, edge: Edge) -> float:
    if isinstance(figures, Mapping):
        if edge in figures:
            return figures[edge]
        passed = [figures.get((stage, stage + 1)) for stage in range(*edge)]
        boundary_figures = [figure for figure in passed if figure is not None]
        if len(boundary_figures) < len(passed):
            raise ScheduleError(f"{name} has no figure for the edge {edge}: give one for each edge between ranks.")
        return max(boundary_figures)
    return max(figures[slice(*edge)]) if isinstance(figures, Sequence) else figures
