"""The cuts of a package moved over whole layers, and the times that its stages then take.

The layers are recognised by the names of the stages' parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pipegraph.package import Manifest
from pipegraph.schedule import Times

_LAYER = re.compile(r"((?:[^.]+\.)*?[0-9]+)\.(.+)")

_StageTimes = tuple[float, float, float]  # F, I, W


@dataclass(frozen=True)
class Layer:
    """``layers.5`` of a stage. Layers with the same ``structure`` have parameters of the same names."""

    name: str
    structure: tuple[str, ...]


@dataclass(frozen=True)
class StageLayers:
    """The layers of a stage.

    Attributes:
        count: of its layers.
        structures: those that the model has more than once.
        first, last: the equal layers at its begin and at its end, from the border on; empty if the stage begins or
            ends with something else.
    """

    count: int
    structures: frozenset[tuple[str, ...]]
    first: tuple[Layer, ...]
    last: tuple[Layer, ...]


def stage_layers(stages: Sequence[Sequence[str]]) -> list[StageLayers]:
    """Return the layers of each stage, given the FQNs of its parameters in the model's order.

    A layer is what stands under an FQN's first number, ``layers.5`` of ``layers.5.norm.weight``. A part of a layer that
    is cut in two counts as a layer, and equals no other because it has fewer names.
    """
    rows = [[_layer(name, list(names)) for name, names in groupby(parameters, key=_name)] for parameters in stages]
    structure_counts = Counter(layer.structure for row in rows for layer in row if layer is not None)
    layers_by_stage = []
    for row in rows:
        repeated_layers = [
            layer if layer is not None and structure_counts[layer.structure] > 1 else None for layer in row
        ]
        structures = frozenset(layer.structure for layer in repeated_layers if layer is not None)
        count = sum(layer is not None for layer in row)
        layers_by_stage.append(StageLayers(count, structures, _equal(repeated_layers), _equal(repeated_layers[::-1])))
    return layers_by_stage


def _equal(layers: Sequence[Layer | None]) -> tuple[Layer, ...]:
    """Return the layers at the begin that equal the first one."""
    equal_layers: list[Layer] = []
    for layer in layers:
        if layer is None or (equal_layers and layer.structure != equal_layers[0].structure):
            break
        equal_layers.append(layer)
    return tuple(equal_layers)


def _name(parameter: str) -> str:
    match = _LAYER.fullmatch(parameter)
    return match[1] if match else ""


def _layer(name: str, parameters: Sequence[str]) -> Layer | None:
    if not name:
        return None
    kind = name.rpartition(".")[0]  # layers of two lists, such as an encoder's and a decoder's, are not equal
    return Layer(name, (kind, *sorted(parameter.removeprefix(name) for parameter in parameters)))


@dataclass(frozen=True)
class CutMove:
    """A change of the cut before the stage ``cut``, the point where it then is, what it assumes, and its times."""

    change: str
    assuming: str
    times: Times
    cut: int
    point: str


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

    equal = [stage for stage, candidate in enumerate(layers) if border[0].structure in candidate.structures]
    best = min(equal, key=lambda stage: sum(of_layer(stage)))
    count, layer_times = layers[best].count, of_layer(best)
    assuming = f"a layer taken as {'all' if count == 1 else f'1/{count}'} of stage {best}"
    for number, last in enumerate(border, 1):
        times = _moved(times, source, target, layer_times)
        ends = (border[0], last) if source > target else (last, border[0])
        layer_names = last.name if number == 1 else f"{ends[0].name} – {ends[1].name}"
        cut, point = (source, f"{last.name}:end") if source > target else (target, last.name)
        yield CutMove(f"move {layer_names} to stage {target}", assuming, times, cut, point)


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
        rows[stage] = [max(0.0, figure + sign * amount) for figure, amount in zip(rows[stage], changes, strict=True)]
    forward, input_grads, weight_grads = zip(*rows, strict=True)
    return replace(times, forward=forward, input_grad=input_grads, weight_grad=weight_grads)


def _times_of(times: Times, stage: int) -> _StageTimes:
    return times.forward[stage], times.input_grad[stage], times.weight_grad[stage]
