"""Times of stages if whole layers moved over a cut, estimated from the measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipegraph.package import Manifest
from pipegraph.schedule import Times
from pipegraph.tracing.analysis.stage_layers import Layer, StageLayers, stage_layers

_StageTimes = tuple[float, float, float]  # F, I, W


@dataclass(frozen=True)
class CutMove:
    """A change of one cut, what it assumes, and the times with it."""

    change: str
    assuming: str
    times: Times


def cut_moves(manifest: Manifest, times: Times) -> Iterator[Iterator[CutMove]]:
    """Yield, for each cut and direction, the moves of one layer, two layers, …, from the cut on.

    A layer takes as long as one layer of any stage that has equal ones: the one with the least time per layer.
    """
    layers = stage_layers([stage.parameters for stage in manifest.stages])
    for cut in range(1, len(manifest.stages)):
        for source, target in ((cut, cut - 1), (cut - 1, cut)):
            border = layers[source].first if source > target else layers[source].last
            border = border[: layers[source].count - 1]  # a stage keeps one
            if border:
                yield _moves(border, source, target, layers, times)


def _moves(
    border: Sequence[Layer], source: int, target: int, layers: Sequence[StageLayers], times: Times
) -> Iterator[CutMove]:
    def of_layer(stage: int) -> _StageTimes:
        forward, input_grad, weight_grad = _times_of(times, stage)
        count = layers[stage].count
        return forward / count, input_grad / count, weight_grad / count

    equal = [stage for stage, held in enumerate(layers) if border[0].structure in held.structures]
    best = min(equal, key=lambda stage: sum(of_layer(stage)))
    count, taken = layers[best].count, of_layer(best)
    assuming = f"a layer taken as {'all' if count == 1 else f'1/{count}'} of stage {best}"
    for number, last in enumerate(border, 1):
        times = _moved(times, source, target, taken)
        ends = (border[0], last) if source > target else (last, border[0])
        what = last.name if number == 1 else f"{ends[0].name} – {ends[1].name}"
        yield CutMove(f"moving {what} to stage {target}", assuming, times)


def _moved(times: Times, source: int, target: int, part: _StageTimes) -> Times:
    """Return the times with a part of one stage in another.

    Each stage keeps its own share of I in a backward: the first has no I, because its input has no gradient.
    """
    rows = [list(_times_of(times, stage)) for stage in range(times.stages)]
    for stage, sign in ((source, -1), (target, 1)):
        _, input_grad, weight_grad = _times_of(times, stage)
        backward = input_grad + weight_grad
        share = input_grad / backward if backward else 0.0
        change = part[1] + part[2]
        changes = (part[0], change * share, change * (1 - share))
        rows[stage] = [max(0.0, figure + sign * each) for figure, each in zip(rows[stage], changes, strict=True)]
    forward, input_grads, weight_grads = zip(*rows, strict=True)
    return replace(times, forward=forward, input_grad=input_grads, weight_grad=weight_grads)


def _times_of(times: Times, stage: int) -> _StageTimes:
    return times.forward[stage], times.input_grad[stage], times.weight_grad[stage]
