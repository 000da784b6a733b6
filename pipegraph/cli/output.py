"""Results: on stdout as text or JSON, and in files that the user named."""

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
    """What `print_json` prints, with escapes for what is not printable: names may hold anything."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **result}, indent=1, ensure_ascii=False)
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)


def print_grid(draw: Callable[[int | None, bool], Text]) -> None:
    """Print what ``draw(width, coloured)`` draws.

    In colour on a terminal or with FORCE_COLOR set, and not with NO_COLOR. Folded to the width of a terminal; elsewhere
    the width is None, and lines are whole.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    coloured = console.color_system is not None and not console.no_color
    drawn = draw(console.width if sys.stdout.isatty() else None, coloured)
    if not coloured:
        print(drawn.plain, flush=True)
        return
    if "TERM" not in os.environ:  # colour is forced, as in the log of a build: take more than 16 of them
        console = Console(highlight=False, soft_wrap=True, color_system="256")
    console.print(drawn)


def write_whole(files: Iterable[tuple[Path, str]]) -> None:
    """Write texts to files, the whole of each or nothing of it, in place of the file that stands there.

    Raises PipegraphError where one cannot be written, or is no regular file: a device must not be replaced.
    """
    for file, text in files:
        try:
            target = file.resolve()  # behind a link, which stays
            if _is_no_file(file):
                raise PipegraphError(f"{file} cannot be written: it is no regular file. Give a file's name.")
            beside = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                beside.write_text(text, encoding="utf-8")
                beside.replace(target)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            missing = not file.parent.is_dir()
            why = f"there is no folder {file.parent}" if missing else error.strerror or str(error)
            raise PipegraphError(f"{file} cannot be written: {why}.") from None


def check_target(file: Path | None, overwrite: bool, ours: Callable[[Path], bool] = lambda file: False) -> None:
    """Refuse before the work a file that could not be written behind it; its folder may be missing, and is made then.

    Raises PipegraphError for a file that exists, unless ``overwrite`` is given or it is ``ours`` to replace; for what
    is no regular file; and where nothing can be written.
    """
    if file is None:
        return
    if _is_no_file(file):
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
    """Write a file that `check_target` has passed, in a new folder if need be."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipegraphError(f"{file} cannot be written: no folder can be made ({error.strerror}).") from None
    write_whole([(file, text)])


def _is_no_file(file: Path) -> bool:
    """Whether this is a folder, a device, ``-``, or a name for this process's stdout, whatever that is."""
    return (
        str(file) == "-"
        or file.absolute().parts[1:2] in (("dev",), ("proc",))
        or (file.exists() and not file.is_file())
    )
