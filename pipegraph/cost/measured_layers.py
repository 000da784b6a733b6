"""The balance ``auto``: the distinct layers run here, as many as a few seconds allow; the rest follows a roofline.

Of a model with repeated layers a few pieces make up nearly all of its time: a layer, and what runs before and after the
layers. What is inside a layer, and layers that were not measured, get the times of the roofline, multiplied by what the
measured layers around them, or all of them, took of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import torch

from pipegraph.cost.block_times import Cache, MeasureOptions, bytes_to_run, measure_first
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.segments.attribution import Times
from pipegraph.cost.segments.distinct_blocks import Block, SegmentGroup, SegmentGroups
from pipegraph.device import Device

_LONGEST, _SHORTEST = 12.0, 4.0  # seconds of measuring, about: no block is begun that would take longer
_PRICING = 17.0  # seconds that pricing takes, about, with what came before measuring, unless that was very long
_ROUNDS = 12  # of all blocks, about: a block that the roofline expects to need longer for these is not run
_MEMORY = 0.5  # the part of the free memory that blocks may take together


def is_at_hand(hardware: Hardware, setting: MeasureOptions) -> bool:
    """Return whether the device that a profile is of is the one that blocks would run on: by its name, or because the
    profile is ``cpu``, which stands for any."""
    if setting.device.startswith("cuda") and not torch.cuda.is_available():
        return False
    return hardware.name == "cpu" or hardware.device.startswith(Device(setting.device).name)


def auto_times(
    parts: SegmentGroups, roofline: Mapping[str, Times], setting: MeasureOptions, cache: Cache, passed: float = 0.0
) -> dict[str, Times]:
    """Return the times of every block by its key: of the layers that were measured these, else from the roofline.

    ``passed`` are seconds that pricing has taken before.
    """
    layers = _layers(parts)
    within = max(_SHORTEST, min(_LONGEST, _PRICING - passed))
    measured = _measured(layers, roofline, setting, cache, within)
    if not measured:
        return dict(roofline)
    layer_of = {index: layer for layer in layers for index in layer.segments}
    around: dict[str, dict[str, None]] = {}
    for part in (*parts.segments, *parts.layers, *parts.runs):
        keys = (layer_of[index].block.key for index in part.segments)
        around.setdefault(part.block.key, {}).update(dict.fromkeys(key for key in keys if key in measured))
    of_all = _ratio(measured, roofline, (layer.block.key for layer in layers))
    times = {}
    for key, inside in around.items():
        ratio = _ratio(measured, roofline, inside) if inside else of_all
        times[key] = measured.get(key) or _multiplied(roofline[key], ratio)
    return times


def _layers(parts: SegmentGroups) -> list[SegmentGroup]:
    """Each layer of the chain in one piece."""
    several = {part.segments: part for part in parts.layers}
    return [several.get(layer) or parts.segments[layer.start] for layer in parts.chain.layers]


def _measured(
    layers: Sequence[SegmentGroup],
    roofline: Mapping[str, Times],
    setting: MeasureOptions,
    cache: Cache,
    within: float,
) -> dict[str, Times]:
    """Run the blocks that take the most of a microbatch first; leave out what is too large or takes too long."""
    blocks = {layer.block.key: layer.block for layer in layers}
    took = dict.fromkeys(blocks, 0.0)
    for layer in layers:
        took[layer.block.key] += sum(roofline[layer.block.key])
    first = [blocks[key] for key in sorted(blocks, key=took.__getitem__, reverse=True)]
    short = [block for block in first if _is_short(roofline[block.key], setting, within)]
    block_times = measure_first(first, _that_fit(short, setting), setting, cache, within)
    return {key: medians.times for key, medians in block_times.items()}


def _is_short(times: Times, setting: MeasureOptions, within: float) -> bool:
    """Return whether rounds of a block are expected to fit the time; of a GPU this profile may say nothing."""
    return setting.has_own_device or _ROUNDS * sum(times) <= within


def _that_fit(blocks: Sequence[Block], setting: MeasureOptions) -> list[Block]:
    """Return the first blocks that fit the device's memory together."""
    free = Device(setting.device).free_bytes
    limit = float("inf") if free is None else _MEMORY * free
    used_bytes = 0

    def fits(block: Block) -> bool:
        nonlocal used_bytes
        used_bytes += bytes_to_run(block)
        return used_bytes <= limit

    return list(takewhile(fits, blocks))


def _ratio(measured: Mapping[str, Times], roofline: Mapping[str, Times], keys: Iterable[str]) -> Times:
    """Return how many times as long as in the roofline F, I and W of these blocks took, if they were measured. What a
    roofline has none of is as the whole backward."""
    pairs = [(measured[key], roofline[key]) for key in keys if key in measured]
    took, expected = ([sum(column) for column in zip(*side, strict=True)] for side in zip(*pairs, strict=True))
    backward = sum(took[1:]) / sum(expected[1:]) if sum(expected[1:]) else took[0] / max(expected[0], 1e-12)
    forward, of_inputs, of_weights = (
        actual / priced if actual and priced else backward for actual, priced in zip(took, expected, strict=True)
    )
    return forward, of_inputs, of_weights


def _multiplied(times: Times, ratio: Times) -> Times:
    forward, of_inputs, of_weights = (seconds * factor for seconds, factor in zip(times, ratio, strict=True))
    return forward, of_inputs, of_weights
