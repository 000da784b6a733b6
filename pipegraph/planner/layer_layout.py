"""Megatron's layout of a pipeline: where a model is cut, as a string of its layers.

``Et*3|(tt|)*29,m|L`` has 32 stages: the embedding with three layers, 29 stages of two layers, one of a layer that
predicts several tokens, and the loss. Here E is what runs before the first of the repeated layers, t one of these,
and L all that runs after the last of them, the final norm and the head included.

Source: ``--pipeline-model-parallel-layout`` of Megatron-LM
(https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/features/pipeline_parallel_layout.html).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise

from pipegraph.arguments import argument
from pipegraph.errors import PlanError
from pipegraph.graph.captured import Captured, Segment
from pipegraph.graph.partition.split_points import Point
from pipegraph.units import format_number_of

EMBEDDING, LAYER, PREDICTION, LOSS = "EtmL"
_SEVERAL = re.compile(r"\(([^()]*)\)\*(\d+)")
_ONE = re.compile(r"([A-Za-z])\*(\d+)")
_MOST = 10_000  # stages and layers together


def is_layout(text: str) -> bool:
    """Return whether a text is a layout rather than names of modules: these hold no bar."""
    return "|" in text


def parse_layout(text: str) -> list[str]:
    """Return the layers of each stage: ``["Ettt", "tt", "L"]`` for ``Et*3|tt|L``.

    Raises:
        PlanError: it is no layout, or a stage has no layer.
    """
    whole = re.sub(r"[\s,]", "", text)
    for pattern in (_SEVERAL, _ONE):
        if sum(int(found[2]) for found in pattern.finditer(whole)) > _MOST:
            raise PlanError(f"The layout {text} has more than {_MOST:,} stages or layers.\nTry: Et*3|(tt|)*4,L.")
        whole = pattern.sub(lambda found: found[1] * int(found[2]), whole)
    unknown = sorted(set(whole) - {EMBEDDING, LAYER, PREDICTION, LOSS, "|"})
    if unknown:
        raise PlanError(
            f'The layout {text} has "{unknown[0]}". It may have E for the embedding, t for a layer, L for what follows '
            "the layers, | between stages, t*3 for ttt and (tt|)*2 for tt|tt|.\nTry: Et*3|(tt|)*4,L."
        )
    stages = whole.split("|")
    empty = [number for number, stage in enumerate(stages) if not stage]
    if empty:
        raise PlanError(
            f"Stage {empty[0]} of the layout {text} has no layer, and a stage computes something.\n"
            f"Try: {format_layout(tuple(filter(None, stages)))}."
        )
    return stages


def layout_points(captured: Captured, text: str) -> tuple[Point, ...]:
    """Return the points that a layout cuts a model at.

    Raises:
        PlanError: as `parse_layout` does; or the model does not have these layers.
    """
    stages = parse_layout(text)
    layers, before, after = _layers(captured)
    if not layers:
        raise PlanError(
            f"{captured.model_name} has no repeated layers, which a layout counts.\n"
            f"Try: {argument('points')} with names of modules, or {argument('stages', 2)}."
        )
    letters = "".join(stages)
    wanted = EMBEDDING * before + LAYER * len(layers) + LOSS * (after is not None)
    given = letters if before else letters.removeprefix(EMBEDDING)
    given = given if after is not None else given.removesuffix(LOSS)
    if given != wanted:
        raise PlanError(
            f"The layout {text} has {_described(letters)}, and {captured.model_name} has {_described(wanted)}.\n"
            f"Try: {argument('points', _even(wanted, len(stages)))}."
        )
    points, done = [], 0
    for stage, following in pairwise(stages):
        done += stage.count(LAYER)
        first = following[0]
        if first == LAYER:
            points.append(Point(layers[done].fqn))
        elif after is not None:
            points.append(Point(after.fqn))
        else:
            raise PlanError(
                f"The last stage of the layout {text} has nothing to compute: {captured.model_name} ends with its last "
                f"layer.\nTry: {argument('points', _even(wanted, len(stages) - 1))}."
            )
    return tuple(points)


def layout_of(captured: Captured, starts: Sequence[int]) -> str:
    """Return the layout of stages that begin at these positions in ``Captured.nodes``, without the first's.

    It is empty for a model without repeated layers, and if a cut is inside a layer.
    """
    layers, before, after = _layers(captured)
    places = {segment.start: index for index, segment in enumerate(layers)}
    if after is not None:
        places[after.start] = len(layers)
    if not layers or any(start not in places for start in starts):
        return ""
    cuts = [places[start] for start in starts]
    if not before and cuts[:1] == [0]:
        return ""
    edges = [0, *cuts, len(layers)]
    stages = [LAYER * (stop - start) for start, stop in pairwise(edges)]
    return format_layout(
        (EMBEDDING + stages[0], *stages[1:-1], f"{stages[-1]}{LOSS}") if cuts else (f"{EMBEDDING}{stages[0]}{LOSS}",)
    )


def format_layout(stages: Sequence[str]) -> str:
    """Return the shortest usual text of stages: ``Et*3|(tt|)*4,L``."""
    parts = []
    groups = [(stage, len(list(group))) for stage, group in groupby(stages[:-1])]
    for stage, count in groups:
        text = re.sub(r"(t)\1{2,}", lambda found: f"{found[1]}*{len(found[0])}", stage)
        parts.append(f"{text}|" if count == 1 else f"({text}|)*{count},")
    last = re.sub(r"(t)\1{2,}", lambda found: f"{found[1]}*{len(found[0])}", stages[-1])
    return "".join([*parts, last])


def _layers(captured: Captured) -> tuple[list[Segment], bool, Segment | None]:
    """Return the layers, whether anything runs before them, and the first segment after them, if there is one."""
    segments = captured.segments
    names = [segment.fqn.rpartition(".") for segment in segments]
    lists = Counter(name for name, _, number in names if number.isdecimal())
    inside = [index for index, (name, _, number) in enumerate(names) if number.isdecimal() and lists[name] > 1]
    after = segments[inside[-1] + 1] if inside and inside[-1] + 1 < len(segments) else None
    return [segments[index] for index in inside], bool(inside) and inside[0] > 0, after


def _described(letters: str) -> str:
    names = {EMBEDDING: "embedding", LAYER: "layer", PREDICTION: "layer of several tokens", LOSS: "end"}
    counts = [(names[letter], len(list(group))) for letter, group in groupby(letters)]
    return ", ".join(format_number_of(name, count) for name, count in counts) or "nothing"


def _even(letters: str, stages: int) -> str:
    """Return a layout of these layers with as many of them in each stage as possible."""
    count = max(1, min(stages, letters.count(LAYER)))
    body = letters.count(LAYER)
    sizes = [(index + 1) * body // count - index * body // count for index in range(count)]
    made = [LAYER * size for size in sizes]
    return format_layout([EMBEDDING + made[0], *made[1:-1], made[-1] + LOSS] if count > 1 else [f"E{made[0]}L"])
