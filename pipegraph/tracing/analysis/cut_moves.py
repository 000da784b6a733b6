"""What stages would take if a cut lay elsewhere, estimated from what they took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipegraph.errors import ScheduleError
from pipegraph.package import Manifest
from pipegraph.planner.package_prediction import predict_step
from pipegraph.schedule import Schedule, Times, build, simulate
from pipegraph.tracing.analysis.stage_layers import Layer, StageLayers, stage_layers

_Row = tuple[float, float, float]  # F, I, W
_TRIES = 12


@dataclass(frozen=True)
class Move:
    """A change of one cut, and the times with it."""

    change: str
    assuming: str
    times: Times


def moves(manifest: Manifest, times: Times) -> Iterator[Iterator[Move]]:
    """Of each cut and direction, moves of more and more layers; or, where no whole layer lies there, of one segment.

    A layer takes as long as any of a stage: of the stages with its equals, the one with the least time for each of its
    layers. A segment takes the share of its stage that makes the planner's value of the neighbouring cut: see `_share`.
    """
    layers = stage_layers([stage.parameters for stage in manifest.stages])
    plan = _Plan.of(manifest)
    for cut in range(1, len(manifest.stages)):
        for source, target in ((cut, cut - 1), (cut - 1, cut)):
            border = layers[source].first if source > target else layers[source].last
            border = border[: layers[source].count - 1]  # a stage keeps one
            if border:
                yield _layers_moved(border, source, target, layers, times)
            elif plan is not None:
                yield _segment_moved(manifest, plan, source, target, times)


def _layers_moved(
    border: Sequence[Layer], source: int, target: int, layers: Sequence[StageLayers], times: Times
) -> Iterator[Move]:
    """One layer, two layers, …, from the border on."""
    structure = border[0].structure

    def each(stage: int) -> _Row:
        forward, input_grad, weight_grad = _row(times, stage)
        count = layers[stage].count
        return forward / count, input_grad / count, weight_grad / count

    best = min((n for n, stage in enumerate(layers) if structure in stage.structures), key=lambda n: sum(each(n)))
    count, taken = layers[best].count, each(best)
    assuming = f"a layer taken as {'all' if count == 1 else f'1/{count}'} of stage {best}"
    for number, last in enumerate(border, 1):
        times = _moved(times, source, target, taken)
        ends = (border[0], last) if source > target else (last, border[0])
        what = last.name if number == 1 else f"{ends[0].name} – {ends[1].name}"
        yield Move(f"moving {what} to stage {target}", assuming, times)


@dataclass(frozen=True)
class _Plan:
    """The step that the planner looked at, with its predicted times."""

    schedule: Schedule
    times: Times

    @classmethod
    def of(cls, manifest: Manifest) -> _Plan | None:
        """None where there was none, or it was not of seconds."""
        plan = manifest.prediction
        if plan is None or not plan.in_seconds:
            return None
        try:
            made = build(plan.schedule, plan.ranks, plan.microbatches, len(plan.placement) // plan.ranks)
        except ScheduleError:
            return None
        made = made.changed(edges=manifest.edges(), gradient_edges=manifest.gradient_edges())
        times = predict_step(manifest, made).times if made.placement == plan.placement else None
        return None if times is None else cls(made, times)


def _segment_moved(manifest: Manifest, plan: _Plan, source: int, target: int, times: Times) -> Iterator[Move]:
    """The planner's neighbour of a cut."""
    cut = max(source, target)
    assert manifest.prediction is not None
    planned = manifest.prediction.cuts[cut - 1]
    shifted = planned.later if source > target else planned.earlier
    if shifted is None or shifted.value is None:
        return

    def makespan(share: float) -> float:
        return simulate(plan.schedule, _shared(plan.times, source, target, share)).makespan

    share = _share(makespan, shifted.value)
    if share is not None:
        change = f"starting stage {cut} at {shifted.point} instead of {planned.point}"
        assuming = f"what moves taken as {share:.0%} of stage {source}, as predicted"
        yield Move(change, assuming, _shared(times, source, target, share))


def _share(makespan: Callable[[float], float], value: float) -> float | None:
    """The part of a stage that must move for a step to take ``value``, as the planner found it would.

    None where that lies below what the step takes without a move: then there may be more than one such part.
    """
    low, high = 0.0, 1.0
    if makespan(low) >= value or makespan(high) <= value:
        return None
    for _ in range(_TRIES):
        middle = (low + high) / 2
        if makespan(middle) < value:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _shared(times: Times, source: int, target: int, share: float) -> Times:
    forward, input_grad, weight_grad = _row(times, source)
    return _moved(times, source, target, (forward * share, input_grad * share, weight_grad * share))


def _moved(times: Times, source: int, target: int, part: _Row) -> Times:
    """Times with a part of one stage in another.

    A stage shares out a backward to I and W in its own way: the first has no I, as its input has no gradient.
    """
    rows = [list(_row(times, stage)) for stage in range(times.stages)]
    for stage, sign in ((source, -1), (target, 1)):
        _, input_grad, weight_grad = _row(times, stage)
        backward = input_grad + weight_grad
        share = input_grad / backward if backward else 0.0
        change = part[1] + part[2]
        changes = (part[0], change * share, change * (1 - share))
        rows[stage] = [max(0.0, figure + sign * each) for figure, each in zip(rows[stage], changes, strict=True)]
    columns = zip(*rows, strict=True)
    return replace(times, **dict(zip(("forward", "input_grad", "weight_grad"), columns, strict=True)))


def _row(times: Times, stage: int) -> _Row:
    return times.forward[stage], times.input_grad[stage], times.weight_grad[stage]
