"""Correct the profile that priced a package by what a run measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import astuple, replace

from pipegraph.cost.hardware import Hardware, check_new
from pipegraph.errors import PipegraphError
from pipegraph.package import Manifest, Package
from pipegraph.package.prediction import LARGEST, SMALLEST, UNCORRECTED, MeasuredRatio
from pipegraph.planner.run_comparison import PredictedAndMeasured, RunComparison
from pipegraph.runtime.precision import changes_dtypes
from pipegraph.schedule import Kind
from pipegraph.units import format_factor

_DIGITS = 4
_UNEVEN = 2.0
"""Ratios of two stages that differ by more than this factor are reported: one ratio cannot correct both."""


def profile_for(package: Package, file: Path, base: Hardware | None = None, precision: str | None = None) -> Hardware:
    """Find the profile that priced a package, and name it as it will be named in ``file``.

    It is looked for in ``file`` (which is then updated), among pipegraph's own, and as ``NAME.json`` in this folder and
    in that of ``file``. A new file gives its name to the profile, so that the two can be distinguished.

    Args:
        package: as `pipegraph split` wrote it.
        file: where the corrected profile is to be written.
        base: the profile, if the user named it.
        precision: of the run.

    Raises:
        PipegraphError: no profile predicted the package's times; the run has other dtypes than the package; the profile
            is not found; or ``file`` holds anything but the same profile, and is not replaced.
    """
    if changes_dtypes(precision, package.manifest):
        raise PipegraphError(
            f"A profile predicts the package's own dtypes, and a run in {precision} cannot correct it.",
            "--recalibrate without --precision, or split the model in that dtype.",
        )
    prediction, stages = package.manifest.prediction, package.manifest.stages
    if prediction is None or prediction.balance != "time" or any(stage.cost.times is None for stage in stages):
        raise PipegraphError(
            "No profile predicted this package's times: there is nothing to correct.",
            "pipegraph split … --balance time --hardware cpu, and then run with --recalibrate.",
        )
    existing, name = _existing_profile(file), prediction.hardware
    if base is not None and base.name != name:
        raise PipegraphError(
            f'The package was priced with the profile "{name}", and --hardware is "{base.name}": what was measured '
            f"does not correct it.",
            f"--hardware with the file of {name}, or pipegraph split … --hardware with this.",
        )
    profile = base
    if profile is None and existing is not None and existing.name == name:
        profile = existing
    if profile is None:
        profile = _profile_by_name(package, name, file)
    if existing is not None and existing.figures != profile.figures:
        raise PipegraphError(
            f'{file} holds the profile "{existing.name}" with other figures than those of "{name}", which priced the '
            f"package: it is not overwritten.",
            f"--recalibrate {file.with_stem(f'{name}-corrected')}, a new file.",
        )
    return replace(profile, name=file.stem if existing is None else existing.name)


def _existing_profile(file: Path) -> Hardware | None:
    if not file.exists():
        check_new(file)
        return None
    try:
        return Hardware.load(file.absolute())  # never the one that pipegraph has by this name
    except PipegraphError as error:
        raise PipegraphError(
            f"{file} exists, is not a hardware profile, and is not overwritten: {error}",
            "--recalibrate hardware.json, or the name of another new file.",
        ) from None


def _profile_by_name(package: Package, name: str, file: Path) -> Hardware:
    if name in Hardware.names():
        return Hardware.load(name)
    near = list(dict.fromkeys((Path(f"{name}.json"), file.parent / f"{name}.json")))
    for path in near:
        if path.is_file() and (profile := Hardware.load(path)).name == name:
            return profile
    if {part.partition("*")[0] for part in name.split(",")} - {name}:
        raise PipegraphError(
            f'The package was priced with the profiles "{name}", and a run corrects one.',
            "pipegraph split … with --hardware of one device, and then run with --recalibrate.",
        )
    places = " or ".join(map(str, near))
    raise PipegraphError(
        f'The package was priced with the profile "{name}", which is not found: no {places} holds it, and it is '
        "not one of pipegraph's own.",
        f"pipegraph run {package.path} --steps 5 --hardware PATH/TO/{name}.json --recalibrate {file}",
    )


def recalibrate_hardware(hardware: Hardware, manifest: Manifest, compared: RunComparison) -> Hardware:
    """Return the profile with the ratios of F, I and W that make it predict what was measured.

    A ratio is the measured time of all stages over their predicted time. If no stage measured I and W apart, a whole
    backward counts for both: a B, or the W of a stage whose inputs have no gradient. The ratios replace those of an
    earlier run.

    Raises:
        PipegraphError: a ratio is too small or large for a correction.
    """
    priced = UNCORRECTED if manifest.prediction is None else manifest.prediction.measured_ratio
    apart = [stage for stage in compared.stages if Kind.I in stage and stage[Kind.I].predicted]
    backward_ratio = _ratio(compared.stages, Kind.B) or _ratio(compared.stages, Kind.W) or 1.0
    figures = {
        "forward": priced.forward * (_ratio(compared.stages, Kind.F) or 1.0),
        "input_grad": priced.input_grad * (_ratio(apart, Kind.I) or backward_ratio),
        "weight_grad": priced.weight_grad * (_ratio(apart, Kind.W) or backward_ratio),
    }
    for name, figure in figures.items():
        if not SMALLEST <= figure <= LARGEST:
            raise PipegraphError(
                f"{name} took {figure:.3g} times as long as {hardware.name} predicts, which is too far for a "
                f"correction ({SMALLEST:g} to {LARGEST:g}).",
                "--hardware with a profile of this device, which pipegraph calibrate measures.",
            )
    measured, schedule = compared.measured, compared.schedule
    source = (
        f"pipegraph run: {manifest.model.class_name or 'a model'}, {schedule.name} with {schedule.microbatches} "
        f"microbatches, medians of {measured.steps} steps, {measured.processes} processes"
    )
    rounded = {name: float(f"{figure:.{_DIGITS}g}") for name, figure in figures.items()}
    return replace(
        hardware, measured_ratio=MeasuredRatio(**rounded), sources={**hardware.sources, "measured_ratio": source}
    )


def format_ratios(hardware: Hardware) -> str:
    """Format a profile's correction: ``F × 2.4, I × 2.1, W × 2.3``."""
    ratios = astuple(hardware.measured_ratio)
    return ", ".join(f"{kind} × {format_factor(ratio)}" for kind, ratio in zip("FIW", ratios, strict=True))


def find_uneven_ratios(compared: RunComparison) -> Iterator[str]:
    """Yield a line for each kind of action whose ratio differs too much between stages."""
    for kind in compared.stages[0]:
        pairs = [(number, stage[kind]) for number, stage in enumerate(compared.stages)]
        ratios = [(pair.measured / pair.predicted, n) for n, pair in pairs if pair.measured and pair.predicted]
        if ratios and max(ratios)[0] > _UNEVEN * min(ratios)[0]:
            (least, least_stage), (most, most_stage) = min(ratios), max(ratios)
            yield (
                f"{kind} took {format_factor(least)} times what was predicted in stage {least_stage}, and "
                f"{format_factor(most)} times in stage {most_stage}: one ratio cannot correct both. "
                "Try: pipegraph calibrate, or a machine that does nothing else"
            )


def _ratio(stages: Sequence[Mapping[Kind, PredictedAndMeasured]], kind: Kind) -> float | None:
    """Return measured over predicted, of all stages that have both."""
    pairs = [stage[kind] for stage in stages if kind in stage]
    measurements = [(pair.measured, pair.predicted) for pair in pairs if pair.measured and pair.predicted]
    if not measurements:
        return None
    measured, predicted = map(sum, zip(*measurements, strict=True))
    return measured / predicted
