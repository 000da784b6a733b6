"""Results of commands: text or JSON on stdout, and files that the user named."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipegraph.errors import PipegraphError

if TYPE_CHECKING:
    from rich.text import Text

SCHEMA_VERSION = 1


def print_json(result: dict[str, Any]) -> None:
    """Print one object with its ``schema_version`` first."""
    print(json_text(result), flush=True)


def json_text(result: dict[str, Any]) -> str:
    """Return what `print_json` prints. Characters that are not printable are escaped: names may hold anything."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **result}, indent=1, ensure_ascii=False)
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)


def print_grid(draw: Callable[[int | None, bool], Text]) -> None:
    """Print what ``draw(width, coloured)`` draws.

    It is coloured on a terminal or with FORCE_COLOR set, and not with NO_COLOR. ``width`` is the terminal's; elsewhere
    it is None, and lines are not folded.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    coloured = console.color_system is not None and not console.no_color
    drawn = draw(console.width if sys.stdout.isatty() else None, coloured)
    if not coloured:
        print(drawn.plain, flush=True)
        return
    if "TERM" not in os.environ:  # colour is forced, as in the log of a build: use more than 16 of them
        console = Console(highlight=False, soft_wrap=True, color_system="256")
    console.print(drawn)


def write_files(files: Iterable[tuple[Path, str]]) -> None:
    """Write each text to its file, which it replaces, wholly or not at all.

    Raises PipegraphError if a file cannot be written, or is no regular file: a device must not be replaced.
    """
    for file, text in files:
        try:
            target = file.resolve()  # of a link, which stays
            if _is_not_a_file(file):
                raise PipegraphError(f"{file} cannot be written: it is no regular file. Give a file's name.")
            part = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                part.write_text(text, encoding="utf-8")
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            missing = not file.parent.is_dir()
            why = f"there is no folder {file.parent}" if missing else error.strerror or str(error)
            raise PipegraphError(f"{file} cannot be written: {why}.") from None


def check_target(file: Path | None, overwrite: bool, ours: Callable[[Path], bool] = lambda file: False) -> None:
    """Check before the work that a file can be written after it. Its folder need not exist.

    Raises PipegraphError if the file exists, unless ``overwrite`` is given or it is ``ours`` to replace; if it is no
    regular file; and if nothing can be written there.
    """
    if file is None:
        return
    if _is_not_a_file(file):
        raise PipegraphError(f"{file} cannot be written: it is no regular file. Give a file's name.")
    if file.exists() and not overwrite and not ours(file):
        raise PipegraphError(f"{file} exists already.\nTry: --overwrite, or another name for -o.")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise PipegraphError(f"{file} cannot be written: {folder} is a file, not a folder.\nTry: another name for -o.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise PipegraphError(
            f"{file} cannot be written: {folder} takes no new file ({error.strerror}).\nTry: -o with another folder."
        ) from None


def write_target(file: Path | None, text: str) -> None:
    """Write a file that `check_target` has checked. Its folder is made if it does not exist."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipegraphError(f"{file} cannot be written: no folder can be made ({error.strerror}).") from None
    write_files([(file, text)])


def _is_not_a_file(file: Path) -> bool:
    """Return whether this is a folder, a device, ``-``, or a name of this process's stdout."""
    return (
        str(file) == "-"
        or file.absolute().parts[1:2] in (("dev",), ("proc",))
        or (file.exists() and not file.is_file())
    )
