"""A model of which some layers recompute otherwise than others, from prices of the whole model with each choice."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from pipegraph.cost.price import PricedModel
from pipegraph.cost.segments.attribution import offloaded_bytes, saved_bytes, weight_saved_bytes
from pipegraph.cost.segments.distinct_blocks import SegmentGroups
from pipegraph.cost.segments.transient import segment_transient_bytes

Choice = TypeVar("Choice", bound=Hashable)


def mix(models: Mapping[Choice, PricedModel], choices: Sequence[Choice]) -> PricedModel:
    """Return the price of a model whose segments have each their choice, without tracing anything again.

    Args:
        models: the prices of one model with each choice, cut at the same places.
        choices: one for each segment; the segments of a layer have one in common.
    """
    first = models[choices[0]]
    segments = tuple(models[choice].parts.segments[index] for index, choice in enumerate(choices))
    layers = tuple(
        models[choices[part.segments.start]].parts.layers[number] for number, part in enumerate(first.parts.layers)
    )
    runs = tuple(
        models[choices[part.segments.start]].parts.runs[number]
        for number, part in enumerate(first.parts.runs)
        if len({choices[index] for index in part.segments}) == 1  # else its layers are computed one by one
    )
    parts = SegmentGroups(first.chain, segments, layers, runs)
    every = range(len(segments))
    saved, weight_saved, away = (count(parts, every) for count in (saved_bytes, weight_saved_bytes, offloaded_bytes))
    transient = segment_transient_bytes(parts)
    costs = tuple(
        replace(
            models[choice].costs[index],
            saved_bytes=saved[index],
            weight_saved_bytes=weight_saved[index],
            offloaded_bytes=away[index],
            transient_bytes=transient[index],
        )
        for index, choice in enumerate(choices)
    )
    crossing = tuple(models[choices[value.maker]].crossing[number] for number, value in enumerate(first.crossing))
    return replace(first, costs=costs, crossing=crossing, parts=parts)
