"""Write a plan as a folder of source, weights and a manifest, or compare it with a folder."""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import NoneType

from msgspec import structs

from pipegraph.arguments import argument, for_asker, require_path, require_type
from pipegraph.codegen.package_files import generate
from pipegraph.codegen.proof import Proof
from pipegraph.codegen.weights import copy_weights, shard_plan, write_weights
from pipegraph.errors import PackageError
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import CONFIG, MANIFEST, WEIGHTS_INDEX, ListedFile, Manifest, Package
from pipegraph.package.folder import WeightSource
from pipegraph.package.staged_folder import existing_parent, staged_folder, unwritable
from pipegraph.planner.plan import Plan
from pipegraph.runtime.checkpoint.weights import open_weights

_PACKAGE_FILE = re.compile(
    r"(__init__|blocks|weights|stage_\d+)\.py|stage-\d{5}-of-\d{5}\.safetensors|__pycache__|"
    rf"{re.escape(MANIFEST)}|{re.escape(WEIGHTS_INDEX)}|{re.escape(CONFIG)}"
)


def write_package(
    plan: Plan,
    out: str | PathLike[str],
    weights: WeightSource = True,
    overwrite: bool = False,
    source: ModelSource | None = None,
) -> Package:
    """Write the stages of a plan.

    The folder appears complete or not at all: everything is written into another one, which takes its place at the end.
    Whoever reads it meanwhile finds the old package or the new one.

    Args:
        plan: from :func:`pipegraph.plan`.
        out: the folder. It must be new, or empty, or hold a package that pipegraph wrote.
        weights: whether to write parameters: the model's own or, if this is a path or `Weights`, those of the
            checkpoint there, with the buffers of ``state_dict()``; the model may then be on the meta device. All other
            buffers are the model's, and are always written.
        overwrite: replace a package in the folder, even if it was edited by hand.
        source: where the model came from, for the manifest.

    Raises:
        PackageError: the folder holds other files, or a package while ``overwrite`` is false; the disk is full; or the
            weights are missing, or those of another model.
        CaptureError: an operation comes from a library that a package could not import; or the written source is not
            the captured graph in any form.
    """
    return write_proved_package(plan, out, weights, overwrite, source)[0]


def write_proved_package(
    plan: Plan,
    out: str | PathLike[str],
    weights: WeightSource = True,
    overwrite: bool = False,
    source: ModelSource | None = None,
) -> tuple[Package, Proof]:
    """Write the stages of a plan as `write_package` does, and return how they were compared with the model as well."""
    of_plan = 'pipegraph.write_package(pipegraph.plan(captured, points=["layers.4"]), "out/")'
    require_type(plan, Plan, "write_package() takes what pipegraph.plan returns", of_plan)
    folder = require_path(out, "out is a folder", 'out="out/"')
    require_type(
        weights, (bool, str, PathLike, Mapping), "weights is True, False, a folder or pipegraph.Weights", "weights=True"
    )
    require_type(overwrite, bool, "overwrite is True or False", "overwrite=True")
    require_type(source, (ModelSource, NoneType), "source is a ModelSource", "source=None")
    require_writable(folder, overwrite)
    checkpoint = None if isinstance(weights, bool) else open_weights(weights)
    generated = generate(plan, bool(weights), source)
    files, manifest = generated.files, generated.manifest
    shards = shard_plan(plan.captured, plan.stages, bool(weights))
    with staged_folder(folder, lambda: require_writable(folder, overwrite)) as staging:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8")
        if checkpoint is None:
            write_weights(plan.captured, shards, staging)
        else:
            (staging / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")  # stages are loaded with it
            write_weights(plan.captured, shard_plan(plan.captured, plan.stages, False), staging)
            copy_weights(plan.captured, shards, staging, checkpoint)
        listed = {name: ListedFile.read(staging / name) for name in (*shards, WEIGHTS_INDEX) if shards}
        written = structs.replace(manifest, shards=listed)
        (staging / MANIFEST).write_text(written.to_json(), encoding="utf-8")
    return Package.open(folder), generated.proof


def _is_worked_in(folder: Path) -> bool:
    """Whether the working folder is this one, or in it."""
    try:
        return Path.cwd().is_relative_to(folder.resolve())
    except OSError:  # it has been removed
        return False


def require_writable(folder: Path, overwrite: bool) -> None:
    """Check, before any work, that a folder can be written and may be replaced.

    Raises:
        PackageError: it cannot be written, holds other files, holds a package while ``overwrite`` is false, or is the
            working folder.
    """
    if folder.exists() and not folder.is_dir():
        raise PackageError(f"{folder} is a file.", f"{argument('out')} with another folder.")
    above = existing_parent(folder)
    try:
        tempfile.TemporaryDirectory(dir=above).cleanup()
    except OSError as error:
        raise unwritable(folder, above, error) from None
    if not folder.is_dir():
        return
    is_empty = not any(folder.iterdir())
    foreign = [] if is_empty else _foreign_files(folder)
    if foreign:
        raise PackageError(
            f"{folder} holds files that pipegraph did not write ({', '.join(foreign[:4])}"
            f"{', …' if len(foreign) > 4 else ''}); it is left alone.",
            f"{argument('out')} with a new folder.",
        )
    if _is_worked_in(folder):
        raise PackageError(
            f"{folder} cannot be replaced: this process works in it.",
            f"{argument('out')} with another folder, or from the folder above it.",
        )
    if not is_empty and not overwrite:
        state = _package_state(folder)
        replace = f"{argument('overwrite', True)} to replace it, or {argument('out')} with a new folder"
        raise PackageError(f"{folder} already holds {state}.", f"{replace}.")


def _package_state(folder: Path) -> str:
    try:
        edited = Package.open(folder).edited()
    except PackageError:
        return "a damaged package"
    return f"a package whose {', '.join(edited)} was edited by hand" if edited else "a package"


def _foreign_files(folder: Path) -> list[str]:
    """The names in a folder that are no files of a package; all names, if pipegraph wrote no package there."""
    names = sorted(entry.name for entry in folder.iterdir())
    source = folder / "__init__.py"
    is_package = source.is_file() and "written by pipegraph" in source.read_text(encoding="utf-8", errors="replace")
    return [name for name in names if not (is_package and _PACKAGE_FILE.fullmatch(name))]


def compare_package(out: str | PathLike[str], files: Mapping[str, str], manifest: Manifest) -> dict[str, str]:
    """Compare a folder with the files and manifest of :func:`~pipegraph.codegen.package_files.generate`.

    Weights are not compared: `pipegraph verify` does that.

    Returns:
        for each file that would change: its name → unified diff from the folder's file to the generated one.

    Raises:
        PackageError: there is no package in the folder.
    """
    folder = Path(out)
    require_package(folder)
    try:
        shards = Manifest.read(folder / MANIFEST).shards
    except PackageError:
        shards = {}
    generated = {**files, MANIFEST: structs.replace(manifest, shards=shards).to_json()}
    changes: dict[str, str] = {}
    for name in sorted({*generated, *(path.name for path in folder.glob("*.py"))}):
        old, new = _lines(folder / name), generated.get(name, "").splitlines(keepends=True)
        if old != new:
            changes[name] = "".join(difflib.unified_diff(old, new, f"{folder / name}", f"{name}, as it would be"))
    return changes


def require_package(folder: Path) -> None:
    """Check, before any work, that a folder holds a package.

    Raises:
        PackageError: it holds none.
    """
    if not (folder / MANIFEST).is_file():
        write = for_asker("pipegraph.write_package writes one", "the same command without --check writes it")
        raise PackageError(f"{folder} holds no package to check.", f"{write}.")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
