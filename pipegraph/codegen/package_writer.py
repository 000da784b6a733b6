"""``write_package``: a plan becomes a folder of source, weights and a manifest."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from pipegraph.codegen.generate import generate
from pipegraph.codegen.weights import shard_plan, write_weights
from pipegraph.errors import PackageError
from pipegraph.graph.model_source import ModelSource
from pipegraph.package import MANIFEST, WEIGHTS_INDEX, Package
from pipegraph.planner.plan import Plan


def write_package(
    plan: Plan,
    out: str | PathLike[str],
    weights: bool = True,
    overwrite: bool = False,
    source: ModelSource | None = None,
) -> Package:
    """Write the stages of a plan.

    The folder appears complete or not at all: everything is written beside it and renamed.

    Args:
        plan: from :func:`pipegraph.plan`.
        out: the folder. It must not exist, be empty, or hold a package that pipegraph wrote.
        weights: write parameters; buffers are written in any case.
        overwrite: replace a package that stands there, edited by hand or not.
        source: where the model came from, for the manifest.

    Raises:
        PackageError: the folder holds other files, or a package and ``overwrite`` is not given; or there are no
        weights.
        CaptureError: an operation comes from a library that a package could not import.
    """
    folder = Path(out)
    _check_folder(folder, overwrite)
    files, manifest = generate(plan, weights, source)
    shards = shard_plan(plan.captured, plan.stages, weights)
    with _beside(folder) as staging:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8")
        write_weights(plan.captured, shards, staging)
        (staging / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return Package.open(folder)


def _check_folder(folder: Path, overwrite: bool) -> None:
    if folder.is_file():
        raise PackageError(f"{folder} is a file.\nTry: -o with another folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    foreign = _foreign_files(folder)
    if foreign:
        raise PackageError(
            f"{folder} holds files that pipegraph did not write ({', '.join(foreign[:4])}"
            f"{', …' if len(foreign) > 4 else ''}); it is left alone.\nTry: -o with a new folder."
        )
    if not overwrite:
        edited = Package.open(folder).edited()
        held = f"a package whose {', '.join(edited)} was edited by hand" if edited else "a package"
        raise PackageError(f"{folder} already holds {held}.\nTry: --overwrite to replace it, or -o with a new folder.")


def _foreign_files(folder: Path) -> list[str]:
    """What stands in a folder beside the files of a package; all of it where there is no package."""
    try:
        manifest = Package.open(folder).manifest
    except PackageError:
        return sorted(entry.name for entry in folder.iterdir())
    own = {*manifest.files, *(stage.weights for stage in manifest.stages), MANIFEST, WEIGHTS_INDEX, "__pycache__"}
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in own)


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new folder next to ``folder``, which takes its place at the end; nothing is left behind after an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield staging
        staging.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            folder.rename(old / "old")
            staging.rename(folder)
            shutil.rmtree(old)
        else:
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
