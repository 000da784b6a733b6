"""Megatron's layout of a pipeline: where a model is cut, as a string of its layers.

``Et*3|(tt|)*29,m|L`` has 32 stages: the embedding with three layers, 29 stages of two layers, one of a layer that
predicts several tokens, and the loss. Here E is what runs before the first of the repeated layers, t one of these,
and L all that runs after the last of them, the final norm and the head included. Only a model whose repeated layers
are one row, each run once and nothing between them, has a layout: a U-Net, with two lists of layers, has none.

Source: ``--pipeline-model-parallel-layout`` of Megatron-LM
(https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/features/pipeline_parallel_layout.html).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from pipegraph.arguments import argument
from pipegraph.errors import PlanError
from pipegraph.graph.captured import Captured, Segment
from pipegraph.graph.partition.split_points import Point, point_before
from pipegraph.units import format_number_of

EMBEDDING, LAYER, PREDICTION, LOSS = "EtmL"
_SEVERAL = re.compile(r"\(([^()]*)\)\*(\d+)")
_REPEATED_LETTER = re.compile(r"([A-Za-z])\*(\d+)")
_MOST = 10_000  # stages and layers together


def is_layout(text: str) -> bool:
    """Return whether a text is a layout rather than names of modules: these hold no bar."""
    return "|" in text


def parse_layout(text: str) -> list[str]:
    """Return the layers of each stage: ``["Ettt", "tt", "L"]`` for ``Et*3|tt|L``.

    Raises:
        PlanError: the text is not a layout, or a stage has no layer.
    """
    letters = re.sub(r"[\s,]", "", text)
    for pattern in (_SEVERAL, _REPEATED_LETTER):
        if sum(int(match[2]) for match in pattern.finditer(letters)) > _MOST:
            raise PlanError(f"The layout {text} has more than {_MOST:,} stages or layers.", "Et*3|(tt|)*4,L.")
        letters = pattern.sub(lambda match: match[1] * int(match[2]), letters)
    unknown = sorted(set(letters) - {EMBEDDING, LAYER, PREDICTION, LOSS, "|"})
    if unknown:
        raise PlanError(
            f'The layout {text} has "{unknown[0]}". It may have E for the embedding, t for a layer, L for what follows '
            "the layers, | between stages, t*3 for ttt and (tt|)*2 for tt|tt|.",
            "Et*3|(tt|)*4,L.",
        )
    stages = letters.split("|")
    if not any(stages):
        raise PlanError(f"The layout {text} has no layer.", "Et*3|(tt|)*4,L.")
    empty = [number for number, stage in enumerate(stages) if not stage]
    if empty:
        raise PlanError(
            f"Stage {empty[0]} of the layout {text} has no layer, and a stage computes something.",
            f"{format_layout(tuple(filter(None, stages)))}.",
        )
    return stages


class _LayerRow(NamedTuple):
    """The repeated layers of a model, which run one after the other with nothing between them.

    Attributes:
        layers: two or more.
        has_embedding: whether anything runs before them.
        next_segment: the first segment after them; None if nothing runs after them.
    """

    layers: Sequence[Segment]
    has_embedding: bool
    next_segment: Segment | None

    @property
    def letters(self) -> str:
        """The layout of all in one stage."""
        return EMBEDDING * self.has_embedding + LAYER * len(self.layers) + LOSS * (self.next_segment is not None)


def layout_points(captured: Captured, text: str) -> tuple[Point, ...]:
    """Return the points that a layout cuts a model at. E and L may stand for nothing, as Megatron's always have them.

    Raises:
        PlanError: as `parse_layout` does; or the model does not have these layers.
    """
    stages = parse_layout(text)
    row = _layer_row(captured)
    if row is None:
        raise _no_row(captured)
    letters = "".join(stages)
    layout_letters = letters if row.has_embedding else letters.removeprefix(EMBEDDING)
    layout_letters = layout_letters if row.next_segment is not None else layout_letters.removesuffix(LOSS)
    if layout_letters != row.letters:
        raise PlanError(
            f"The layout {text} has {_described(letters)}, and {captured.model_name} has {_described(row.letters)}.",
            f"{argument('points', _even(row.letters, len(stages)))}.",
        )
    points, done = [], 0
    for stage, following in pairwise(stages):
        done += stage.count(LAYER)
        if not done and not row.has_embedding:
            raise PlanError(
                f"The first stage of the layout {text} has nothing to compute: {captured.model_name} begins with its "
                f"first layer.",
                f"{argument('points', _even(row.letters, len(stages) - 1))}.",
            )
        if following[0] == LAYER:
            points.append(point_before(captured, row.layers[done]))
        elif row.next_segment is not None:
            points.append(point_before(captured, row.next_segment))
        else:
            raise PlanError(
                f"The last stage of the layout {text} has nothing to compute: {captured.model_name} ends with its last "
                f"layer.",
                f"{argument('points', _even(row.letters, len(stages) - 1))}.",
            )
    return tuple(points)


def layout_of(captured: Captured, starts: Sequence[int]) -> str:
    """Return the layout of stages that begin at these positions in ``Captured.nodes``, without the first's.

    It is empty for a model without one row of repeated layers, without a cut, and if a cut is not between two of E, the
    layers and L.
    """
    row = _layer_row(captured)
    if row is None or not starts:
        return ""
    places = {segment.start: index for index, segment in enumerate(row.layers)}
    if row.next_segment is not None:
        places[row.next_segment.start] = len(row.layers)
    if any(start not in places for start in starts):
        return ""
    edges = [0, *(places[start] for start in starts), len(row.layers)]
    stages = [LAYER * (stop - start) for start, stop in pairwise(edges)]
    stages[0] = EMBEDDING * row.has_embedding + stages[0]
    stages[-1] += LOSS * (row.next_segment is not None)
    return format_layout(stages)


def format_layout(stages: Sequence[str]) -> str:
    """Return the shortest usual text of stages: ``Et*3|(tt|)*4,L``."""
    parts = []
    groups = [(stage, len(list(group))) for stage, group in groupby(stages[:-1])]
    for stage, count in groups:
        text = re.sub(r"(t)\1{2,}", lambda match: f"{match[1]}*{len(match[0])}", stage)
        parts.append(f"{text}|" if count == 1 else f"({text}|)*{count},")
    last = re.sub(r"(t)\1{2,}", lambda match: f"{match[1]}*{len(match[0])}", stages[-1])
    return "".join([*parts, last])


def _layer_row(captured: Captured) -> _LayerRow | None:
    """Return the repeated layers of a model; None if it has none, several lists of them, or something between them."""
    lists = [*_layer_lists(captured).values()]
    if len(lists) != 1:
        return None
    (numbers,) = lists
    first, stop = numbers[0], numbers[-1] + 1
    row, next_segments = captured.segments[first:stop], captured.segments[stop : stop + 1]
    if len(row) != len(numbers) or len({layer.fqn for layer in row}) != len(row):
        return None
    return _LayerRow(row, first > 0, next_segments[0] if next_segments else None)


def _layer_lists(captured: Captured) -> dict[str, list[int]]:
    """The lists of modules that have repeated layers: ``layers`` of ``layers.0``, ``layers.1``, … → their segments.

    In a list a layer is repeated if it has a class that another one has too. Modules without parts, such as the linear
    ones at the ends of a ``Sequential`` of blocks, are layers only where nothing else is repeated.
    """
    holders = {fqn.rpartition(".")[0] for fqn in captured.modules}
    of_class: dict[tuple[str, str], list[int]] = {}
    for index, segment in enumerate(captured.segments):
        name, _, number = segment.fqn.rpartition(".")
        if number.isdecimal():
            of_class.setdefault((name, captured.modules[segment.fqn].class_name), []).append(index)
    repeated = {key: indices for key, indices in of_class.items() if len(indices) > 1}
    blocks = {key: positions for key, positions in repeated.items() if captured.segments[positions[0]].fqn in holders}
    lists: dict[str, list[int]] = {}
    for (name, _), indices in (blocks or repeated).items():
        lists[name] = sorted([*lists.get(name, ()), *indices])
    return lists


def _no_row(captured: Captured) -> PlanError:
    lists = _layer_lists(captured)
    counts = [f"{format_number_of('layer', len(indices))} in {name or 'itself'}" for name, indices in lists.items()]
    why = ", not in a row and once each" if len(lists) == 1 else ""
    return PlanError(
        f"A layout counts layers that follow one another in one list, and {captured.model_name} has "
        f"{' and '.join(counts) or 'no repeated layers'}{why}.",
        f"{argument('points')} with names of modules, or {argument('stages', 2)}.",
    )


def _described(letters: str) -> str:
    names = {EMBEDDING: "embedding", LAYER: "layer", PREDICTION: "layer of several tokens", LOSS: "end"}
    counts = [(names[letter], len(list(group))) for letter, group in groupby(letters)]
    return ", ".join(format_number_of(name, count) for name, count in counts) or "nothing"


def _even(letters: str, stages: int) -> str:
    """Return a layout that divides these layers between the stages as evenly as possible."""
    layers = letters.count(LAYER)
    prefix, suffix = letters.partition(LAYER)[0], letters.rpartition(LAYER)[2]
    count = max(1, min(stages, layers))
    stage_letters = [LAYER * ((index + 1) * layers // count - index * layers // count) for index in range(count)]
    stage_letters[0] = prefix + stage_letters[0]
    stage_letters[-1] += suffix
    return format_layout(stage_letters)
