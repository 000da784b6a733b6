"""Is a package on disk what would be written now?"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from msgspec import structs

from pipegraph.errors import PackageError
from pipegraph.package import MANIFEST, Manifest


def check_package(out: str | PathLike[str], files: Mapping[str, str], manifest: Manifest) -> dict[str, str]:
    """Compare the folder ``out`` with what :func:`~pipegraph.codegen.package_files.generate` gave; nothing is written.

    Weights are not compared: `pipegraph verify` does that.

    Returns:
        file → unified diff from what stands there to what would be written, for each file that would change.

    Raises:
        PackageError: there is no package.
    """
    folder = Path(out)
    check_there(folder)
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


def check_there(folder: Path) -> None:
    """Refuse, before any work, a folder without a package. Raises PackageError."""
    if not (folder / MANIFEST).is_file():
        raise PackageError(f"{folder} holds no package to check.\nTry: the same command without --check writes it.")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
