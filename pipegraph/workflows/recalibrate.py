"""What a run measured, written back to the profile that its package was priced with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import astuple, replace

from pipegraph.cost.hardware import Hardware, MeasuredRatio, check_new
from pipegraph.errors import PipegraphError
from pipegraph.package import Manifest, Package
from pipegraph.package.prediction import LARGEST, SMALLEST, UNCORRECTED
from pipegraph.planner.run_comparison import PredictedAndMeasured, RunComparison
from pipegraph.schedule import Kind
from pipegraph.units import format_factor

_DIGITS = 4
_UNEVEN = 2.0
"""The factor between the ratios of two stages from which on one for both is told to be none of either."""


def profile_for(package: Package, file: Path, given: Hardware | None = None) -> Hardware:
    """The profile that priced the package, by the name that it is to have in ``file``.

    It is ``given``, or the one in the file already, which is then updated; else the one that pipegraph has by its name,
    or the file of that name here or beside ``file``. A new file names its profile, so that two can be told apart.

    Raises PipegraphError where the package has no times that a profile predicted, where that profile is not found, or
    where the file holds anything but the same profile: nothing else is replaced.
    """
    prediction, stages = package.manifest.prediction, package.manifest.stages
    if prediction is None or prediction.balance != "time" or any(stage.cost.times is None for stage in stages):
        raise PipegraphError(
            "No profile predicted this package's times: there is nothing to correct.\n"
            "Try: pipegraph split … --balance time --hardware cpu, and then run with --recalibrate."
        )
    there, name = _standing(file), prediction.hardware
    if given is not None and given.name != name:
        raise PipegraphError(
            f'The package was priced with the profile "{name}", and --hardware is "{given.name}": what was measured '
            f"does not correct it.\nTry: --hardware with the file of {name}, or pipegraph split … --hardware with this."
        )
    found = given
    if found is None and there is not None and there.name == name:
        found = there
    if found is None:
        found = _by_name(package, name, file)
    if there is not None and there.figures != found.figures:
        raise PipegraphError(
            f'{file} holds the profile "{there.name}" with other figures than those of "{name}", which priced the '
            f"package: it is not overwritten.\nTry: --recalibrate {file.with_stem(f'{name}-corrected')}, a new file."
        )
    return replace(found, name=file.stem if there is None else there.name)


def _standing(file: Path) -> Hardware | None:
    """The profile in a file that is there."""
    if not file.exists():
        check_new(file)
        return None
    try:
        return Hardware.load(file.absolute())  # never the one that pipegraph has by this name
    except PipegraphError as error:
        raise PipegraphError(
            f"{file} is there, is no hardware profile, and is not overwritten: {error}\n"
            f"Try: --recalibrate hardware.json, or the name of another new file."
        ) from None


def _by_name(package: Package, name: str, file: Path) -> Hardware:
    if name in Hardware.names():
        return Hardware.load(name)
    near = list(dict.fromkeys((Path(f"{name}.json"), file.parent / f"{name}.json")))
    for each in near:
        if each.is_file() and (found := Hardware.load(each)).name == name:
            return found
    places = " or ".join(map(str, near))
    raise PipegraphError(
        f'The package was priced with the profile "{name}", and its file is not found: there is no {places} that holds '
        f"it, and pipegraph has none of that name.\n"
        f"Try: pipegraph run {package.path} --steps 5 --hardware PATH/TO/{name}.json --recalibrate {file}"
    )


def recalibrated(hardware: Hardware, manifest: Manifest, compared: RunComparison) -> Hardware:
    """The profile with the ratios of F, I and W that make it predict what was measured.

    Each is what stages took together, over what was predicted of them. Where a backward is measured whole, in a B or in
    the W of a stage whose inputs have no gradient, it counts for I and W alike, if no stage tells them apart. It
    replaces what an earlier run left: the last one counts.
    """
    priced = UNCORRECTED if manifest.prediction is None else manifest.prediction.measured_ratio
    apart = [stage for stage in compared.stages if Kind.I in stage and stage[Kind.I].predicted]
    whole = _ratio(compared.stages, Kind.B) or _ratio(compared.stages, Kind.W) or 1.0
    figures = {
        "forward": priced.forward * (_ratio(compared.stages, Kind.F) or 1.0),
        "input_grad": priced.input_grad * (_ratio(apart, Kind.I) or whole),
        "weight_grad": priced.weight_grad * (_ratio(apart, Kind.W) or whole),
    }
    for name, figure in figures.items():
        if not SMALLEST <= figure <= LARGEST:
            raise PipegraphError(
                f"{name} took {figure:.3g} times as long as the figures of {hardware.name} come to, which is no "
                f"correction any more ({SMALLEST:g} to {LARGEST:g}).\n"
                "Try: --hardware with a profile of this device, which pipegraph calibrate measures."
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


def ratios(hardware: Hardware) -> str:
    """A profile's correction: ``F × 2.4, I × 2.1, W × 2.3``."""
    each = astuple(hardware.measured_ratio)
    return ", ".join(f"{kind} × {format_factor(ratio)}" for kind, ratio in zip("FIW", each, strict=True))


def uneven(compared: RunComparison) -> Iterator[str]:
    """A line for each kind of action of which stages disagree: no one ratio corrects them."""
    for kind in compared.stages[0]:
        pairs = [(number, stage[kind]) for number, stage in enumerate(compared.stages)]
        found = [(pair.measured / pair.predicted, n) for n, pair in pairs if pair.measured and pair.predicted]
        if found and max(found)[0] > _UNEVEN * min(found)[0]:
            (least, one), (most, other) = min(found), max(found)
            yield (
                f"{kind} took {format_factor(least)} times what was predicted in stage {one}, and "
                f"{format_factor(most)} times in stage {other}: one ratio cannot correct both. "
                "Try: pipegraph calibrate, or a machine that does nothing else"
            )


def _ratio(stages: Sequence[Mapping[Kind, PredictedAndMeasured]], kind: Kind) -> float | None:
    """Measured over predicted, of all stages that have both."""
    pairs = [stage[kind] for stage in stages if kind in stage]
    known = [(pair.measured, pair.predicted) for pair in pairs if pair.measured and pair.predicted]
    if not known:
        return None
    measured, predicted = map(sum, zip(*known, strict=True))
    return measured / predicted
