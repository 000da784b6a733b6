"""Progress and output of the children of `launch`, passed to their parent, which has the terminal.

The child appends lines of JSON to a file whose name is in its environment. The parent reads the file as it grows.
Printed lines go the same way, so that they and a progress bar do not get into each other.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipegraph.errors import OutputError
from pipegraph.progress import Listener, current_listener

_VARIABLE = "PIPEGRAPH_PROGRESS"
_POLL_SECONDS = 0.05

PrintLine = Callable[[str], None]
"""Prints lines on stdout."""


class ProgressRelay:
    """The child's end."""

    def __init__(self, file: str) -> None:
        self._file = open(file, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until `close`

    @staticmethod
    def to_parent(quiet: bool = False) -> ProgressRelay | None:
        """The relay to the parent; None if no parent listens, or this process is ``quiet``.

        The process's own children do not inherit the relay.
        """
        file = os.environ.pop(_VARIABLE, None)
        return None if file is None or quiet else ProgressRelay(file)

    def report(self, task: str, done: int, total: int) -> None:
        """Pass on what was reported to `pipegraph.progress.report_progress`."""
        self._write([task, done, total])

    def print(self, line: str) -> None:
        """Print on the parent's stdout."""
        self._write(line)

    def close(self) -> None:
        self._file.close()

    def _write(self, message: object) -> None:
        self._file.write(json.dumps(message) + "\n")


@contextmanager
def relay_progress(print_line: PrintLine) -> Iterator[Mapping[str, str]]:
    """Pass on what children report and print while the body runs. Gives what to add to their environment.

    Does nothing if nobody listens to this process's own progress. If a line cannot be printed, because stdout is
    closed, the body is interrupted as by Ctrl-C and the error is raised.
    """
    listener = current_listener()
    if listener is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="pipegraph-progress-") as folder:
        file, over, failed = Path(folder, "messages"), threading.Event(), list[Exception]()
        file.touch()
        main = threading.main_thread().ident or 0

        def read() -> None:
            try:
                _read(file, over, listener, print_line)
            except (OSError, OutputError) as error:
                failed.append(error)
                if not over.is_set():
                    signal.pthread_kill(main, signal.SIGINT)

        reader = threading.Thread(target=read, name="progress", daemon=True)
        reader.start()
        try:
            yield {_VARIABLE: str(file)}
        finally:
            over.set()
            reader.join()
            if failed:
                raise failed[0]


def _read(file: Path, over: threading.Event, listener: Listener, print_line: PrintLine) -> None:
    with file.open(encoding="utf-8") as messages:
        incomplete_line, is_last = "", False
        while not is_last:
            is_last = over.wait(_POLL_SECONDS)  # then one more reading finds everything
            *lines, incomplete_line = (incomplete_line + messages.read()).split("\n")
            for message in map(json.loads, lines):
                print_line(message) if isinstance(message, str) else listener(*message)
