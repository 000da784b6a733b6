"""What a run measured corrects the profile that its package was priced with."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipegraph.codegen.generate import generate
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.ratio import Ratio
from pipegraph.errors import PipegraphError
from pipegraph.graph.capture import capture
from pipegraph.package import Manifest
from pipegraph.planner.plan import plan
from pipegraph.report.beside import beside
from pipegraph.report.recalibrate import profile_for, recalibrated
from pipegraph.report.training import Measured
from pipegraph.schedule import Kind, build
from tests.models.chain import Chain

SLOWER = Ratio(forward=1.5, input_grad=2.0, weight_grad=0.8)


def priced(hardware: Hardware) -> Manifest:
    torch.manual_seed(0)
    captured = capture(Chain(64), (torch.randn(4, 64),))
    return generate(plan(captured, points=["layers.2"], balance="time", hardware=hardware), weights=False)[1]


def took(manifest: Manifest, schedule: str) -> Measured:
    """A run by a clock that goes by what the manifest predicts."""
    times = {}
    for stage in manifest.stages:
        times[stage.index, Kind.F] = stage.cost["forward"]
        if schedule == "1f1b":
            times[stage.index, Kind.B] = stage.cost["input_grad"] + stage.cost["weight_grad"]
        else:
            times[stage.index, Kind.I] = stage.cost["input_grad"]
            times[stage.index, Kind.W] = stage.cost["weight_grad"]
    return Measured(3, times, 1.0, (0, 0), (0, 0), (), 2, "inductor")


@pytest.fixture(scope="module")
def cpu() -> tuple[Hardware, Manifest]:
    hardware = Hardware.load("cpu")
    return hardware, priced(hardware)


def correct(hardware: Hardware, manifest: Manifest, schedule: str, factors: Ratio) -> Hardware:
    """The profile after a run on a device that takes so many times as long as ``cpu``."""
    truth = priced(replace(Hardware.load("cpu"), measured_ratio=factors))
    return recalibrated(hardware, manifest, beside(manifest, build(schedule, 2, 4), took(truth, schedule)))


def test_prices_are_then_what_was_measured(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    corrected = correct(hardware, manifest, "zb-h1", SLOWER)
    assert asdict(corrected.measured_ratio) == pytest.approx(asdict(SLOWER), rel=0.05)
    again = priced(Hardware.from_json(corrected.to_json()))
    assert again.plan["measured_ratio"] == asdict(corrected.measured_ratio)
    measured = took(priced(replace(hardware, measured_ratio=SLOWER)), "zb-h1")
    compared = beside(again, build("zb-h1", 2, 4), measured)
    errors = [pair.error for stage in compared.stages for pair in stage.values()]
    assert max(abs(error) for error in errors if error is not None) < 0.05


def test_what_was_priced_with_a_ratio_multiplies_it(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    once = correct(hardware, manifest, "zb-h1", Ratio(2.0, 2.0, 2.0))
    twice = correct(once, priced(once), "zb-h1", Ratio(3.0, 1.5, 1.5))
    assert asdict(twice.measured_ratio) == pytest.approx(asdict(Ratio(3.0, 1.5, 1.5)), rel=1e-3)
    # The old package again: the last run counts, by what its own package was priced with.
    back = correct(twice, manifest, "zb-h1", Ratio(1.2, 1.2, 1.2))
    assert asdict(back.measured_ratio) == pytest.approx(asdict(Ratio(1.2, 1.2, 1.2)), rel=1e-3)


def test_whole_backwards_give_one_ratio(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    ratio = correct(hardware, manifest, "1f1b", SLOWER).measured_ratio
    assert ratio.input_grad == ratio.weight_grad
    assert SLOWER.weight_grad < ratio.weight_grad < SLOWER.input_grad
    again = priced(replace(hardware, measured_ratio=ratio))
    truth = priced(replace(hardware, measured_ratio=SLOWER))
    assert backwards(again) == pytest.approx(backwards(truth), rel=0.01)


def backwards(manifest: Manifest) -> float:
    return sum(stage.cost["input_grad"] + stage.cost["weight_grad"] for stage in manifest.stages)


def test_the_rest_of_the_profile_stays(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    corrected = correct(hardware, manifest, "1f1b", SLOWER)
    assert corrected.sources["measured_ratio"] == (
        "pipegraph run: Chain, 1f1b with 4 microbatches, medians of 3 steps, 2 processes"
    )
    assert replace(corrected, measured_ratio=Ratio(), sources=hardware.sources) == hardware


def test_another_device_is_no_correction(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    with pytest.raises(PipegraphError, match=r"forward took 1e\+03 times as long as the figures of cpu come to"):
        correct(hardware, manifest, "1f1b", Ratio(1000.0, 1.0, 1.0))


def changed(manifest: Manifest, **changes: Any) -> Manifest:
    return replace(manifest, plan={**manifest.plan, **changes})


def test_the_profile_to_correct(cpu: tuple[Hardware, Manifest], tmp_path: Path) -> None:
    hardware, manifest = cpu
    file = tmp_path / "mine.json"
    assert profile_for(manifest, file) == hardware
    corrected = correct(hardware, manifest, "1f1b", SLOWER)
    file.write_text(corrected.to_json())
    assert profile_for(manifest, file) == corrected
    assert profile_for(manifest, file, given=hardware) == hardware


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"balance": "measured"}, "No profile predicted this package's times"),
        ({"balance": "parameters"}, "No profile predicted this package's times"),
        ({"hardware": "mine"}, 'priced with the profile "mine", and neither is .* Try: --hardware FILE'),
    ],
)
def test_no_profile(cpu: tuple[Hardware, Manifest], tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PipegraphError, match=said.replace(" Try", r"\sTry")):
        profile_for(changed(cpu[1], **changes), tmp_path / "mine.json")


def test_another_profile(cpu: tuple[Hardware, Manifest], tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(Hardware.load("h100").to_json())
    with pytest.raises(PipegraphError, match='priced with the profile "cpu", and this one is "h100"'):
        profile_for(cpu[1], file)
    file.write_text("precious")
    with pytest.raises(PipegraphError, match="is no hardware profile"):
        profile_for(cpu[1], file)
    with pytest.raises(PipegraphError, match="there is no folder"):
        profile_for(cpu[1], tmp_path / "none" / "mine.json")
