"""A plan becomes a folder of source, weights and a manifest, or is compared with one."""

from __future__ import annotations

import difflib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from msgspec import structs

from pipegraph.codegen.package_files import generate
from pipegraph.codegen.shards import copy_weights, shard_plan, write_weights
from pipegraph.errors import PackageError
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import MANIFEST, WEIGHTS_INDEX, Manifest, Package, checkpoint_folder, file_digest
from pipegraph.planner.plan import Plan

_OF_A_PACKAGE = re.compile(
    r"(__init__|blocks|weights|stage_\d+)\.py|stage-\d{5}-of-\d{5}\.safetensors|__pycache__|"
    rf"{re.escape(MANIFEST)}|{re.escape(WEIGHTS_INDEX)}"
)


def write_package(
    plan: Plan,
    out: str | PathLike[str],
    weights: bool | str | PathLike[str] = True,
    overwrite: bool = False,
    source: ModelSource | None = None,
) -> Package:
    """Write the stages of a plan.

    The folder appears complete or not at all: everything is written beside it and renamed.

    Args:
        plan: from :func:`pipegraph.plan`.
        out: the folder. It must not exist, be empty, or hold a package that pipegraph wrote.
        weights: write parameters: the model's own or, with a path, those of a Hugging Face checkpoint, with the buffers
            of ``state_dict()``; the model may then be on the meta device. All other buffers are the model's, and are
            written in any case.
        overwrite: replace a package that stands there, edited by hand or not.
        source: where the model came from, for the manifest.

    Raises:
        PackageError: the folder holds other files, or a package and ``overwrite`` is not given; or there are no
        weights, or not those of this model.
        CaptureError: an operation comes from a library that a package could not import.
    """
    folder = Path(out)
    require_writable(folder, overwrite)
    checkpoint = None if isinstance(weights, bool) else checkpoint_folder(weights)
    files, manifest = generate(plan, bool(weights), source)
    shards = shard_plan(plan.captured, plan.stages, bool(weights))
    with _beside(folder) as staging:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8")
        if checkpoint is None:
            write_weights(plan.captured, shards, staging)
        else:
            (staging / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")  # to load stages by
            write_weights(plan.captured, shard_plan(plan.captured, plan.stages, False), staging)
            copy_weights(plan.captured, shards, staging, checkpoint)
        written = structs.replace(manifest, shards={name: file_digest(staging / name) for name in shards})
        (staging / MANIFEST).write_text(written.to_json(), encoding="utf-8")
    return Package.open(folder)


def require_writable(folder: Path, overwrite: bool) -> None:
    """Refuse, before any work, a folder that could not be written or must not be replaced. Raises PackageError."""
    if folder.is_file():
        raise PackageError(f"{folder} is a file.\nTry: -o with another folder.")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    try:
        tempfile.TemporaryDirectory(dir=above).cleanup()
    except OSError as error:
        raise _unwritable(folder, above, error) from None
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    foreign = _foreign_files(folder)
    if foreign:
        raise PackageError(
            f"{folder} holds files that pipegraph did not write ({', '.join(foreign[:4])}"
            f"{', …' if len(foreign) > 4 else ''}); it is left alone.\nTry: -o with a new folder."
        )
    if not overwrite:
        held = _held(folder)
        raise PackageError(f"{folder} already holds {held}.\nTry: --overwrite to replace it, or -o with a new folder.")


def _unwritable(folder: Path, above: Path, error: OSError) -> PackageError:
    """``above`` is what stands of the path to the folder."""
    why = f"takes no new folder ({error.strerror})" if above.is_dir() else "is a file, not a folder"
    return PackageError(f"{folder} cannot be written: {above} {why}.\nTry: -o with another folder.")


def _held(folder: Path) -> str:
    try:
        edited = Package.open(folder).edited()
    except PackageError:
        return "a damaged package"
    return f"a package whose {', '.join(edited)} was edited by hand" if edited else "a package"


def _foreign_files(folder: Path) -> list[str]:
    """What stands in a folder beside the files of a package, whole or damaged; all of it where there is no package."""
    names = sorted(entry.name for entry in folder.iterdir())
    source = folder / "__init__.py"
    ours = source.is_file() and "written by pipegraph" in source.read_text(encoding="utf-8", errors="replace")
    return [name for name in names if not (ours and _OF_A_PACKAGE.fullmatch(name))]


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new folder next to ``folder``, which takes its place at the end; nothing is left behind after an error."""
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, above, error) from None
    try:
        yield staging
        # As the user's umask wants it: mkdtemp and safetensors write for the owner alone.
        mode = (staging / MANIFEST).stat().st_mode & 0o777
        for file in staging.iterdir():
            file.chmod(mode)
        staging.chmod(mode | (mode & 0o444) >> 2)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            folder.rename(old / "old")
            staging.rename(folder)
            shutil.rmtree(old)
        else:
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def compare_package(out: str | PathLike[str], files: Mapping[str, str], manifest: Manifest) -> dict[str, str]:
    """Compare the folder ``out`` with what :func:`~pipegraph.codegen.package_files.generate` gave; nothing is written.

    Weights are not compared: `pipegraph verify` does that.

    Returns:
        file → unified diff from what stands there to what would be written, for each file that would change.

    Raises:
        PackageError: there is no package.
    """
    folder = Path(out)
    require_package(folder)
    try:
        shards = Manifest.read(folder / MANIFEST).shards
    except PackageError:
        shards = {}
    wanted = {**files, MANIFEST: structs.replace(manifest, shards=shards).to_json()}
    there = {path.name for path in folder.glob("*.py")} | {MANIFEST}
    found: dict[str, str] = {}
    for name in sorted({*wanted, *there}):
        before, after = _lines(folder / name), wanted.get(name, "").splitlines(keepends=True)
        if before != after:
            found[name] = "".join(difflib.unified_diff(before, after, f"{folder / name}", f"{name}, as it would be"))
    return found


def require_package(folder: Path) -> None:
    """Refuse, before any work, a folder without a package. Raises PackageError."""
    if not (folder / MANIFEST).is_file():
        raise PackageError(f"{folder} holds no package to check.\nTry: the same command without --check writes it.")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
