"""The balance ``auto``: which blocks are measured, how their times are used, and when no block is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

import pipegraph
from pipegraph.cost import block_times, measured_layers
from pipegraph.cost.block_times import BlockTimes, Cache, MeasureOptions, measure_first
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.measured_layers import auto_times, is_at_hand
from pipegraph.cost.price import price
from pipegraph.cost.segments.distinct_blocks import Block, SegmentGroups
from pipegraph.device import Device
from pipegraph.planner.plan_options import PlanOptions
from tests.cost.models import model
from tests.planner.machine import MACHINE

QUICK = MeasureOptions(kernels="eager", seconds=0.02)
FACTORS = 2.0, 3.0, 5.0


@pytest.fixture
def parts() -> SegmentGroups:
    """An embedding, three layers of several segments each, and a head."""
    return price(model("decoder"), "time").parts


def roofline(parts: SegmentGroups) -> dict[str, Any]:
    """1, 10 and 100 s for each block, but no I where no input has a gradient."""
    return {block.key: (1.0, 10.0 * block.has_input_grad, 100.0) for block in parts.blocks()}


def only(parts: SegmentGroups, monkeypatch: pytest.MonkeyPatch, *, first: int) -> list[str]:
    """Let the first blocks of those that are to be measured take `FACTORS` times what the roofline says."""
    expected, requested_keys = roofline(parts), []

    def measured(blocks: Sequence[Block], possible: Sequence[Block], *_: Any) -> dict[str, BlockTimes]:
        requested_keys.extend(block.key for block in possible)
        times_by_key = {block.key: expected[block.key] for block in possible[:first]}
        return {
            key: BlockTimes(*(time * factor for time, factor in zip(times, FACTORS, strict=True)))
            for key, times in times_by_key.items()
        }

    monkeypatch.setattr(measured_layers, "measure_first", measured)
    monkeypatch.setattr(measured_layers, "_SHORTEST", 1e9)
    return requested_keys


def test_what_is_inside_a_measured_layer_takes_as_many_times_as_long(
    parts: SegmentGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested_keys = only(parts, monkeypatch, first=1)
    predicted = roofline(parts)
    actual = auto_times(parts, predicted, QUICK, Cache())
    (layer, *_) = parts.layers
    assert requested_keys[0] == layer.block.key, "three layers take more than the embedding or the head"
    assert len(set(requested_keys)) == len(requested_keys) < len(predicted)
    for part in (layer, *(parts.segments[index] for index in layer.segments)):
        expected = [time * factor for time, factor in zip(predicted[part.block.key], FACTORS, strict=True)]
        assert actual[part.block.key] == pytest.approx(expected)


def test_what_was_not_measured_follows_all_that_was(parts: SegmentGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    only(parts, monkeypatch, first=1)
    predicted = roofline(parts)
    actual = auto_times(parts, predicted, QUICK, Cache())
    assert actual.keys() == predicted.keys()
    for key, times in actual.items():
        assert times == pytest.approx([time * factor for time, factor in zip(predicted[key], FACTORS, strict=True)])


def test_what_fits_neither_memory_nor_time_is_not_run(
    parts: SegmentGroups, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    predicted, cache = roofline(parts), Cache(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(block_times, "_run", lambda *_: pytest.fail("something was run"))
        assert auto_times(parts, predicted, QUICK, cache) == predicted, "111 s are too long"
        patched.setattr(measured_layers, "_SHORTEST", 1e9)
        patched.setattr(Device, "free_bytes", 1000)
        assert auto_times(parts, predicted, QUICK, cache) == predicted
    monkeypatch.setattr(measured_layers, "_SHORTEST", 1e9)
    actual = auto_times(parts, predicted, replace(QUICK, seconds=0.0), cache)
    assert actual != predicted
    monkeypatch.setattr(Device, "free_bytes", 1000)
    assert auto_times(parts, predicted, QUICK, cache) == actual, "what was measured once counts"


def test_measuring_gets_what_pricing_has_left(parts: SegmentGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(measured_layers, "measure_first", lambda *arguments: limits.append(arguments[-1]) or {})
    for passed in (0.0, 9.0, 60.0):
        auto_times(parts, roofline(parts), QUICK, Cache(), passed)
    assert limits == [12.0, 8.0, 4.0]


def test_within_no_time_one_block_is_measured_and_always_the_same(parts: SegmentGroups, tmp_path: Path) -> None:
    cache, (first, *other_blocks) = Cache(tmp_path), parts.blocks()
    times = measure_first([first, *other_blocks], [first, *other_blocks], QUICK, cache, 0.0)
    assert list(times) == [first.key]
    again = measure_first([first, *other_blocks], other_blocks, QUICK, cache, 60.0)
    assert again == times, "it is kept which ones were measured"
    more_times = measure_first([first, *other_blocks[:2]], [first, *other_blocks[:2]], QUICK, cache, 60.0)
    assert list(more_times) == [first.key, *(block.key for block in other_blocks[:2])]
    assert more_times[first.key] == times[first.key]


def test_layers_add_up_to_what_was_measured(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    priced = price(model("decoder"), "auto", setting=QUICK, cache=cache)
    assert (priced.method, priced.unit) == ("auto", "s")
    (layer, *_) = [part for part in priced.parts.layers if part.block.count > 1]
    measured = cache.get(QUICK.key(layer.block))
    assert measured is not None
    stage = priced.stage(layer.segments.start, layer.segments.stop)
    inside = [crossing.at_ends(layer.segments) for crossing in priced.crossing]
    assert stage.forward - sum(times[0] for times in inside) == pytest.approx(measured["forward"])
    assert price(model("decoder"), "auto", setting=QUICK, cache=cache).costs == priced.costs


def test_which_device_is_at_hand() -> None:
    cpu, device = Hardware.load("cpu"), Device("cpu").name
    calibrated = structs.replace(MACHINE, device=f"{device}, 1 thread a rank, torch {torch.__version__}")
    assert is_at_hand(cpu, QUICK) and is_at_hand(calibrated, QUICK)
    assert not is_at_hand(Hardware.load("h100"), QUICK)
    gpu = MeasureOptions("cuda")
    assert is_at_hand(cpu, gpu) == torch.cuda.is_available()


def test_auto_is_time_where_the_hardware_is_not_here(tmp_path: Path) -> None:
    assert PlanOptions("auto").on_ranks(2).balance == "auto"
    assert PlanOptions("auto", hardware=MACHINE).on_ranks(2).balance == "time"
    settings: dict[str, Any] = {"stages": 2, "setting": QUICK, "cache": Cache(tmp_path)}
    captured = model("tests.models.chain")
    away = pipegraph.plan(captured, balance="auto", hardware="h100", **settings).prediction
    assert away == pipegraph.plan(captured, balance="time", hardware="h100", **settings).prediction
    assert not list(tmp_path.iterdir())
    at_hand = pipegraph.plan(captured, balance="auto", **settings).prediction
    assert at_hand is not None and at_hand.balance == "auto" and 0 < at_hand.value < 1
    assert list(tmp_path.iterdir())
