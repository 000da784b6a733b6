"""What a run measured corrects the profile that its package was priced with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from msgspec.structs import replace

from pipegraph.codegen.package_files import generate
from pipegraph.cost.hardware import Hardware
from pipegraph.errors import PipegraphError
from pipegraph.graph.capture import capture
from pipegraph.package import Manifest, Package
from pipegraph.package.prediction import UNCORRECTED, MeasuredRatio
from pipegraph.planner.plan import plan
from pipegraph.planner.run_comparison import compare_run
from pipegraph.runtime.measurements import MeasuredRun, MeasuredState
from pipegraph.schedule import Kind, build
from pipegraph.workflows.recalibrate import find_uneven_ratios, format_ratios, profile_for, recalibrate_hardware
from tests.equal_work import equal_work_shared
from tests.messages import refused
from tests.models.chain import Chain

SLOWER = MeasuredRatio(forward=1.5, input_grad=2.0, weight_grad=0.8)


def priced(hardware: Hardware) -> Manifest:
    torch.manual_seed(0)
    with equal_work_shared():
        captured = capture(Chain(64), (torch.randn(4, 64),))
        chain_plan = plan(captured, points=["layers.2"], balance="time", hardware=hardware)
    return generate(chain_plan, weights=False).manifest


def took(manifest: Manifest, schedule: str) -> MeasuredRun:
    """A run by a clock that goes by what the manifest predicts."""
    times = {}
    for stage in manifest.stages:
        assert stage.cost.times is not None
        forward, input_grad, weight_grad = stage.cost.times
        times[stage.index, Kind.F] = forward
        if schedule == "1f1b":
            times[stage.index, Kind.B] = input_grad + weight_grad
        else:
            times[stage.index, Kind.I] = input_grad
            times[stage.index, Kind.W] = weight_grad
    return MeasuredRun(3, times, 1.0, (MeasuredState(0, 0, 0, 0),) * 2, (0, 0), (), 2, "inductor")


@pytest.fixture(scope="module")
def cpu() -> tuple[Hardware, Manifest]:
    hardware = Hardware.load("cpu")
    return hardware, priced(hardware)


def correct(hardware: Hardware, manifest: Manifest, schedule: str, factors: MeasuredRatio) -> Hardware:
    """The profile after a run on a device that is slower than ``cpu`` by these factors."""
    truth = priced(replace(Hardware.load("cpu"), measured_ratio=factors))
    return recalibrate_hardware(hardware, manifest, compare_run(manifest, build(schedule, 2, 4), took(truth, schedule)))


def test_prices_are_then_what_was_measured(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    corrected = correct(hardware, manifest, "zb-h1", SLOWER)
    assert structs.asdict(corrected.measured_ratio) == pytest.approx(structs.asdict(SLOWER), rel=0.05)
    again = priced(Hardware.from_json(corrected.to_json()))
    assert again.prediction.measured_ratio == corrected.measured_ratio
    measured = took(priced(replace(hardware, measured_ratio=SLOWER)), "zb-h1")
    compared = compare_run(again, build("zb-h1", 2, 4), measured)
    errors = [pair.error for stage in compared.stages for pair in stage.values()]
    assert max(abs(error) for error in errors if error is not None) < 0.05


def test_what_was_priced_with_a_ratio_multiplies_it(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    once = correct(hardware, manifest, "zb-h1", MeasuredRatio(2.0, 2.0, 2.0))
    twice = correct(once, priced(once), "zb-h1", MeasuredRatio(3.0, 1.5, 1.5))
    assert structs.asdict(twice.measured_ratio) == pytest.approx(structs.asdict(MeasuredRatio(3.0, 1.5, 1.5)), rel=1e-3)
    # The old package again: the last run counts, by what its own package was priced with.
    back = correct(twice, manifest, "zb-h1", MeasuredRatio(1.2, 1.2, 1.2))
    assert structs.asdict(back.measured_ratio) == pytest.approx(structs.asdict(MeasuredRatio(1.2, 1.2, 1.2)), rel=1e-3)


def test_whole_backwards_give_one_ratio(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    ratio = correct(hardware, manifest, "1f1b", SLOWER).measured_ratio
    assert ratio.input_grad == ratio.weight_grad
    assert SLOWER.weight_grad < ratio.weight_grad < SLOWER.input_grad
    again = priced(replace(hardware, measured_ratio=ratio))
    truth = priced(replace(hardware, measured_ratio=SLOWER))
    assert backwards(again) == pytest.approx(backwards(truth), rel=0.01)


def backwards(manifest: Manifest) -> float:
    return sum(sum(stage.cost.times[1:]) for stage in manifest.stages)


def test_the_rest_of_the_profile_stays(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    corrected = correct(hardware, manifest, "1f1b", SLOWER)
    assert corrected.sources["measured_ratio"] == (
        "pipegraph run: Chain, 1f1b with 4 microbatches, medians of 3 steps, 2 processes"
    )
    assert replace(corrected, measured_ratio=UNCORRECTED, sources=hardware.sources) == hardware


def test_another_device_is_no_correction(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    with refused(PipegraphError, "forward", "1e+03 times", "cpu", advice="pipegraph calibrate"):
        correct(hardware, manifest, "1f1b", MeasuredRatio(1000.0, 1.0, 1.0))


def package(manifest: Manifest, **changes: Any) -> Package:
    prediction = structs.replace(manifest.prediction, **changes)
    planned = structs.replace(manifest.plan, prediction=prediction)
    return Package(Path("out"), structs.replace(manifest, plan=planned))


def write(hardware: Hardware, file: Path) -> Path:
    file.write_text(hardware.to_json())
    return file


def test_the_profile_to_correct(cpu: tuple[Hardware, Manifest], tmp_path: Path) -> None:
    """A new file gives the profile its name; so both are found again by what priced a package."""
    hardware, manifest = cpu
    file, file_hardware = tmp_path / "mine.json", replace(hardware, name="mine")
    assert profile_for(package(manifest), file) == file_hardware
    corrected = correct(file_hardware, manifest, "1f1b", SLOWER)
    write(corrected, file)
    assert profile_for(package(manifest), file) == file_hardware
    assert profile_for(package(manifest), file, base=hardware) == file_hardware
    assert profile_for(package(priced(corrected)), file) == corrected
    path = tmp_path / "other.json"
    assert profile_for(package(priced(corrected)), path, base=corrected) == replace(corrected, name="other")
    assert profile_for(package(priced(corrected)), path) == replace(corrected, name="other")  # next to mine.json


def test_a_profile_of_this_folder(
    cpu: tuple[Hardware, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware, manifest = cpu
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    write(replace(hardware, name="hw"), Path("hw.json"))
    assert profile_for(package(manifest, hardware="hw"), Path("sub/hw2.json")).name == "hw2"
    write(replace(hardware, name="else"), Path("hw.json"))
    with refused(
        PipegraphError, '"hw"', "hw.json or sub/hw.json", advice="--hardware PATH/TO/hw.json --recalibrate sub/hw2.json"
    ):
        profile_for(package(manifest, hardware="hw"), Path("sub/hw2.json"))


def test_corrections_under_two_names_do_not_stack(cpu: tuple[Hardware, Manifest], tmp_path: Path) -> None:
    hw = replace(cpu[0], name="hw")
    write(hw, tmp_path / "hw.json")
    file, truth = tmp_path / "hw2.json", MeasuredRatio(2.0, 2.0, 2.0)
    for _ in range(2):  # the second run of the same package comes to the same
        write(correct(profile_for(package(priced(hw)), file), priced(hw), "zb-h1", truth), file)
        assert (Hardware.load(file).name, structs.asdict(Hardware.load(file).measured_ratio)) == (
            "hw2", pytest.approx(structs.asdict(truth), rel=1e-3)
        )  # fmt: skip
    again = priced(Hardware.load(file))
    assert again.prediction.hardware == "hw2"
    third = tmp_path / "hw3.json"
    for target in (file, third):
        twice = correct(profile_for(package(again), target), again, "zb-h1", MeasuredRatio(3.0, 3.0, 3.0))
        assert twice.name == target.stem
        assert structs.asdict(twice.measured_ratio) == pytest.approx(
            structs.asdict(MeasuredRatio(3.0, 3.0, 3.0)), rel=1e-3
        )


@pytest.mark.parametrize("balance", ["measured", "parameters"])
def test_nothing_to_correct(cpu: tuple[Hardware, Manifest], tmp_path: Path, balance: str) -> None:
    with refused(PipegraphError, "No profile", advice="--balance time --hardware cpu"):
        profile_for(package(cpu[1], balance=balance), tmp_path / "mine.json")


def test_a_profile_that_is_not_found(cpu: tuple[Hardware, Manifest], tmp_path: Path) -> None:
    file = tmp_path / "hw2.json"
    command = f"pipegraph run out --steps 5 --hardware PATH/TO/hw.json --recalibrate {file}"
    with refused(PipegraphError, '"hw"', f"hw.json or {tmp_path}/hw.json", advice=command):
        profile_for(package(cpu[1], hardware="hw"), file)


def test_profiles_of_unequal_devices(cpu: tuple[Hardware, Manifest], tmp_path: Path) -> None:
    with refused(PipegraphError, '"h100*2,a100"', advice="one device"):
        profile_for(package(cpu[1], hardware="h100*2,a100"), tmp_path / "new.json")


def test_another_profile(cpu: tuple[Hardware, Manifest], tmp_path: Path) -> None:
    h100 = Hardware.load("h100")
    file = write(h100, tmp_path / "mine.json")
    for hardware in (None, cpu[0]):
        with refused(PipegraphError, "mine.json", '"h100"', '"cpu"', advice="cpu-corrected.json, a new file"):
            profile_for(package(cpu[1]), file, hardware)
    with refused(PipegraphError, '"cpu"', '--hardware is "h100"', advice="--hardware"):
        profile_for(package(cpu[1]), tmp_path / "new.json", h100)
    with refused(PipegraphError, '"h100"', advice="/h100-here.json"):
        profile_for(package(cpu[1]), tmp_path / "h100.json")


@pytest.mark.parametrize("name", ["victim.py", "cpu", "data.json"])
@pytest.mark.parametrize("named", [False, True])
def test_nothing_but_a_profile_is_overwritten(
    cpu: tuple[Hardware, Manifest], tmp_path: Path, name: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text('{"precious": 1}')
    with refused(PipegraphError, f"{name} exists", "not overwritten", advice="--recalibrate"):
        profile_for(package(cpu[1]), Path(name), cpu[0] if named else None)


def test_ratios_and_stages_that_disagree(cpu: tuple[Hardware, Manifest]) -> None:
    hardware, manifest = cpu
    assert (
        format_ratios(replace(hardware, measured_ratio=MeasuredRatio(2.44, 15.13, 0.5))) == "F × 2.4, I × 15, W × 0.5"
    )
    measured = took(manifest, "1f1b")
    schedule = build("1f1b", 2, 4)
    for factor, expected in (
        (1.9, []),
        (3.0, ["F took 1 times what was predicted in stage 0, and 3 times in stage 1"]),
    ):
        times = {**measured.times, (1, Kind.F): factor * measured.times[1, Kind.F]}
        lines = list(find_uneven_ratios(compare_run(manifest, schedule, dataclasses.replace(measured, times=times))))
        assert [line.partition(":")[0] for line in lines] == expected
