"""Results of commands: text or JSON on stdout, files that the user named, and errors of both."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pipegraph.errors import ClosedOutput, OutputError, PipegraphError
from pipegraph.regular_file import replaced_file
from pipegraph.report.text import wrap

if TYPE_CHECKING:
    from rich.text import Text

SCHEMA_VERSION = 1

# ---- results ---------------------------------------------------------------------------------------------------------


def print_json(result: dict[str, Any]) -> None:
    """Print one object with its ``schema_version`` first."""
    print(json_text(result), flush=True)


def json_text(result: dict[str, Any]) -> str:
    """Return what `print_json` prints. Characters that are not printable are escaped: names may hold anything."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **result}, indent=1, ensure_ascii=False)
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def terminal_width(stream: TextIO, wide: bool = False) -> int | None:
    """Return the columns of the terminal that a stream writes to, or COLUMNS.

    None, for as many as a line needs, if there is neither or with ``--wide``.
    """
    if wide or not (stream.isatty() or os.environ.get("COLUMNS", "").isdecimal()):
        return None
    return shutil.get_terminal_size().columns


def wrapped(text: str, stream: TextIO) -> str:
    """Return ``text`` with the lines that are wider than the terminal broken between words."""
    return wrap(text, terminal_width(stream))


def print_text(draw: Callable[[int | None], str], wide: bool = False) -> None:
    """Print the text of ``draw(width)``, with long lines of prose broken between words. None is an unlimited width."""
    width = terminal_width(sys.stdout, wide)
    print(wrap(draw(width), width), flush=True)


def print_drawing(draw: Callable[[int | None, bool], Text], wide: bool = False) -> None:
    """Print the drawing of ``draw(width, coloured)``, as `print_text` does.

    It is coloured on a terminal or with FORCE_COLOR set, and not with NO_COLOR.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    coloured = console.color_system is not None and not console.no_color
    width = terminal_width(sys.stdout, wide)
    drawing = draw(width, coloured)
    if not coloured:
        print(wrap(drawing.plain, width), flush=True)
        return
    if "TERM" not in os.environ:  # colour is forced, as in the log of a build: use more than 16 of them
        console = Console(highlight=False, soft_wrap=True, color_system="256")
    lines = drawing.split("\n", allow_blank=True)
    console.print(Text("\n").join(line if line.spans else Text(wrap(line.plain, width)) for line in lines))


# ---- files -----------------------------------------------------------------------------------------------------------


def write_drawings(files: Iterable[tuple[Path, str, str]]) -> None:
    """Write drawings, each a (file, suffix, text). An older drawing is replaced, because it can be drawn again.

    Raises PipegraphError, before anything is written, if an existing file does not have the suffix: it is not a
    drawing, but something else, such as the model's source; if two files have one name; and as `write_files` does.
    """
    files = list(files)
    for (file, *_), (other_file, *_) in combinations(files, 2):
        if file.resolve() == other_file.resolve():
            raise PipegraphError(f"{other_file} was named for two files, of which one would be left.", "two names.")
    for file, suffix, _ in files:
        if file.is_file() and file.suffix.lower() != suffix and file.stat().st_size:
            raise PipegraphError(f"{file} exists already and is not a {suffix} file.", f"{file.with_suffix(suffix)}.")
    write_files((file, text) for file, _, text in files)


def write_files(files: Iterable[tuple[Path, str]]) -> None:
    """Write each text to its file. A file is replaced completely or not at all.

    Raises PipegraphError if a file cannot be written, or is not a regular file: a device must not be replaced.
    """
    for file, text in files:
        try:
            target = file.resolve()  # of a link, which stays
            if _is_not_a_file(file):
                raise PipegraphError(f"{file} cannot be written: it is not a regular file.", "the name of a file.")
            with replaced_file(target) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            missing = not file.parent.is_dir()
            why = f"there is no folder {file.parent}" if missing else error.strerror or str(error)
            raise PipegraphError(f"{file} cannot be written: {why}.", "another folder.") from None


def check_target(
    file: Path | None, overwrite: bool, is_replaceable: Callable[[Path], bool] = lambda file: False, option: str = "-o"
) -> None:
    """Check before the work that a file, which an option names, can be written after it. Its folder need not exist.

    Raises PipegraphError if the file exists, unless ``overwrite`` is given or ``is_replaceable`` returns True for it;
    if it is not a regular file; and if nothing can be written there.
    """
    if file is None:
        return
    if _is_not_a_file(file):
        raise PipegraphError(f"{file} cannot be written: it is not a regular file.", "the name of a file.")
    if file.exists() and not overwrite and not is_replaceable(file):
        raise PipegraphError(f"{file} exists already.", f"--overwrite, or another name for {option}.")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise PipegraphError(
            f"{file} cannot be written: {folder} is a file, not a folder.", f"another name for {option}."
        )
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise PipegraphError(
            f"{file} cannot be written: {folder} takes no new file ({error.strerror}).",
            f"{option} with another folder.",
        ) from None


def write_target(file: Path | None, text: str) -> None:
    """Write a file that `check_target` has checked. Its folder is made if it does not exist."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipegraphError(
            f"{file} cannot be written: no folder can be made ({error.strerror}).", "another folder."
        ) from None
    write_files([(file, text)])


def _is_not_a_file(file: Path) -> bool:
    """Return whether this is a folder, a device, ``-``, or a name of this process's stdout."""
    return (
        str(file) == "-"
        or file.absolute().parts[1:2] in (("dev",), ("proc",))
        or (file.exists() and not file.is_file())
    )


# ---- stdout and stderr -----------------------------------------------------------------------------------------------
# If text cannot be written there, they raise an error of pipegraph.


class OutputStream:
    """A text stream that raises `OutputError` if it cannot be written, and `ClosedOutput` if nobody reads it."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        with self._errors():
            return int(self._stream.write(text))

    def flush(self) -> None:
        with self._errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._discard()
            if isinstance(error, BrokenPipeError):
                raise ClosedOutput(f"{self._name} was closed by its reader.") from error
            raise OutputError(
                f"{self._name} cannot be written: {error.strerror or error}.",
                "make room there, or send the output elsewhere.",
            ) from error

    def _discard(self) -> None:
        """Discard the buffered text, which would fail again when the process ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def output_streams() -> Iterator[None]:
    """Replace stdout and stderr with such streams for the body, and flush them at its end."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # of a locale without the characters of tables and drawings
    out: Any = OutputStream(sys.stdout or io.StringIO(), "stdout")  # None if it was closed before Python started
    err: Any = OutputStream(sys.stderr or io.StringIO(), "stderr")
    with redirect_stdout(out), redirect_stderr(err):
        yield
        out.flush()
        err.flush()
