"""stdout and stderr of the command line: if text cannot be written there, they raise an error of pipegraph."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from pipegraph.errors import ClosedOutput, OutputError


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
