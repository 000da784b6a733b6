"""What a run measured, written back to the profile that its package was priced with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipegraph.cost.hardware import Hardware
from pipegraph.cost.ratio import LARGEST, SMALLEST, Ratio
from pipegraph.errors import PipegraphError
from pipegraph.package import Manifest
from pipegraph.report.beside import Beside, Pair
from pipegraph.schedule import Kind

_DIGITS = 4


def profile_for(manifest: Manifest, file: Path, given: Hardware | None = None) -> Hardware:
    """The profile to correct: ``given``, else the one in the file, else the one that pipegraph has by that name.

    Raises PipegraphError where the package has no times that a profile predicted, where the profile is not the one that
    priced it, or where the file cannot be.
    """
    plan = manifest.plan
    if plan.get("balance") != "time" or any("forward" not in stage.cost for stage in manifest.stages):
        raise PipegraphError(
            "No profile predicted this package's times: there is nothing to correct.\n"
            "Try: pipegraph split … --balance time --hardware cpu, and then run with --recalibrate."
        )
    if not file.absolute().parent.is_dir():
        raise PipegraphError(f"{file} cannot be written: there is no folder {file.parent}.")
    name = str(plan["hardware"])
    if given is None and not file.exists() and name not in Hardware.names():
        raise PipegraphError(
            f'The package was priced with the profile "{name}", and neither is {file} there nor is that a profile of '
            "pipegraph's.\nTry: --hardware FILE with the file of that profile."
        )
    found = given or Hardware.load(file if file.exists() else name)
    if found.name != name:
        raise PipegraphError(
            f'The package was priced with the profile "{name}", and this one is "{found.name}": what was measured '
            f"does not correct it.\nTry: pipegraph split … --hardware with that profile, or another file."
        )
    return found


def recalibrated(hardware: Hardware, manifest: Manifest, compared: Beside) -> Hardware:
    """The profile with the ratios of F, I and W that make it predict what was measured.

    Each is what stages took together, over what was predicted of them. Where a backward is measured whole, in a B or in
    the W of a stage whose inputs have no gradient, it counts for I and W alike, if no stage tells them apart. It
    replaces what an earlier run left: the last one counts.
    """
    priced = Ratio.from_json(manifest.plan.get("measured_ratio"))
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
        f"pipegraph run: {manifest.model.get('class', 'a model')}, {schedule.name} with {schedule.microbatches} "
        f"microbatches, medians of {measured.steps} steps, {measured.processes} processes"
    )
    rounded = {name: float(f"{figure:.{_DIGITS}g}") for name, figure in figures.items()}
    return replace(hardware, measured_ratio=Ratio(**rounded), sources={**hardware.sources, "measured_ratio": source})


def _ratio(stages: Sequence[Mapping[Kind, Pair]], kind: Kind) -> float | None:
    """Measured over predicted, of all stages that have both."""
    pairs = [stage[kind] for stage in stages if kind in stage]
    known = [(pair.measured, pair.predicted) for pair in pairs if pair.measured and pair.predicted]
    if not known:
        return None
    measured, predicted = map(sum, zip(*known, strict=True))
    return measured / predicted
