"""``plan``: split points become stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipegraph.cost.stage import StageCost, stage_cost
from pipegraph.errors import PlanError
from pipegraph.graph.calls import Call, call_tree
from pipegraph.graph.captured import Captured
from pipegraph.graph.segments import holds_parameter, whole_calls
from pipegraph.graph.split_points import Point, SplitPoint, locate, mark
from pipegraph.graph.stages import Boundary, StageGraph, boundaries, divide


@dataclass(frozen=True, eq=False)
class Plan:
    """Where a model is cut, and what follows from it.

    Attributes:
        captured: the model; its graph carries a ``split_point`` node at each cut.
        points: the split points, in order.
        stages: one more than points.
        boundaries: everything that crosses, the model's inputs and outputs included.
        costs: of each stage, for one microbatch.
    """

    captured: Captured = field(repr=False)
    points: tuple[Point, ...]
    stages: tuple[StageGraph, ...]
    boundaries: tuple[Boundary, ...] = field(repr=False)
    costs: tuple[StageCost, ...]

    def describe(self) -> list[str]:
        """A line per stage: ``stage 0: embed, layers.0 – layers.3``."""
        return [f"stage {stage.index}: {', '.join(stage_modules(self.captured, stage))}" for stage in self.stages]


def plan(
    captured: Captured,
    points: Sequence[str | Point] | Mapping[str, SplitPoint] | None = None,
    stages: int | None = None,
) -> Plan:
    """Cut a captured model.

    Args:
        captured: from :func:`pipegraph.capture`.
        points: FQNs that start a stage (``layers.4``; ``layers.3:end`` starts one behind it), in the model's order; or
            FQN → ``SplitPoint``, as ``torch.distributed.pipelining`` takes them.
        stages: cut into this many stages of equally many segments instead.

    Raises:
        PlanError: a point is unknown, out of order, duplicate or cuts nothing; more stages than segments; or neither or
            both of ``points`` and ``stages``.
    """
    if points is not None and stages is not None:
        raise PlanError("Both split points and a number of stages were given.\nTry: --points or --stages, not both.")
    if stages is not None:
        chosen, starts = _equal_segments(captured, stages)
    elif points:
        chosen = _points(points)
        starts = locate(captured, chosen)
    else:
        raise PlanError(
            f"No split point was given for {captured.model_name}.\n"
            f"Try: --points {_suggestion(captured)}, or --stages 2."
        )
    marked = mark(captured, chosen, starts)
    divided = divide(marked)
    crossing = boundaries(marked, divided)
    return Plan(
        captured=marked,
        points=chosen,
        stages=divided,
        boundaries=crossing,
        costs=tuple(_cost(marked, stage, crossing) for stage in divided),
    )


def _points(points: Sequence[str | Point] | Mapping[str, SplitPoint]) -> tuple[Point, ...]:
    if isinstance(points, Mapping):
        return tuple(Point(fqn, side) for fqn, side in points.items())
    if isinstance(points, str):
        raise PlanError(f"points is a string, not a sequence of names.\nTry: points={points.split(',')!r}.")
    return tuple(point if isinstance(point, Point) else Point.parse(point) for point in points)


def _equal_segments(captured: Captured, stages: int) -> tuple[tuple[Point, ...], list[int]]:
    chain = captured.segments
    if stages < 1:
        raise PlanError(f"A model cannot be cut into {stages} stages.\nTry: --stages 2.")
    if stages > len(chain):
        raise PlanError(
            f"{captured.model_name} has {len(chain)} segments ({_few([segment.fqn for segment in chain])}), which is "
            f"too few for {stages} stages.\nTry: --stages {len(chain)}, or --points inside a segment."
        )
    firsts = [chain[round(index * len(chain) / stages)] for index in range(1, stages)]
    return tuple(Point(segment.fqn) for segment in firsts), [segment.start for segment in firsts]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, …, {names[-1]}"


def _suggestion(captured: Captured) -> str:
    chain = captured.segments
    return chain[len(chain) // 2].fqn or "layers.4"


def _cost(captured: Captured, stage: StageGraph, crossing: Sequence[Boundary]) -> StageCost:
    producer = {boundary.node: boundary for boundary in crossing}
    return stage_cost(
        stage.nodes,
        [captured.state[fqn] for fqn in stage.state],
        received=[node for node in stage.inputs if producer[node].producer >= 0],
        sent=[node for node in stage.outputs if set(producer[node].consumers) - {stage.index}],
    )


def stage_modules(captured: Captured, stage: StageGraph) -> list[str]:
    """The modules of a stage as a person would list them: ``embed``, ``layers.0 – layers.3``."""
    listed = list(dict.fromkeys(_whole(captured, call_tree(stage.nodes))))
    return [_range(run) for run in _runs(listed)] or ["operations of the model itself"]


def _whole(captured: Captured, root: Call) -> Iterator[str]:
    """FQNs of the calls that stay whole and hold parameters; of a call that was cut, those of the calls inside."""
    whole = {call.call: len(list(call.nodes())) for call in call_tree(captured.nodes).descendants()}

    def parts(call: Call) -> Iterator[Call]:
        inner = list(call.calls())
        if not inner or len(list(call.nodes())) == whole[call.call]:
            yield call
            return
        for child in inner:
            yield from parts(child)

    for call in whole_calls(captured, root):
        yield from (part.fqn for part in parts(call) if holds_parameter(captured, part))


def _runs(names: Sequence[str]) -> list[list[str]]:
    """Group neighbours that count up: layers.0, layers.1, …"""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def _follows(before: str, after: str) -> bool:
    (stem, _, number), (other, _, next_number) = before.rpartition("."), after.rpartition(".")
    return stem == other and number.isdecimal() and next_number.isdecimal() and int(next_number) == int(number) + 1


def _range(run: Sequence[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]} – {run[-1]}"
