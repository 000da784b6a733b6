"""What a child of `launch` tells and prints, handed to its parent, which has the terminal.

The child appends a line of JSON for each to a file whose name it has from the parent; the parent reads it as it grows.
What is printed goes the same way, so that lines and a bar do not get into each other.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipegraph.progress import Listener, current_listener

_FILE = "PIPEGRAPH_PROGRESS"
_OFTEN = 0.05  # seconds between two looks

Say = Callable[[str], None]
"""Prints lines on stdout."""


class Relay:
    """The child's end."""

    def __init__(self, file: str) -> None:
        self._file = open(file, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until `close`

    @staticmethod
    def to_parent(quiet: bool = False) -> Relay | None:
        """Where the parent wants to hear from this process, unless that is ``quiet``; not from children of its own."""
        file = os.environ.pop(_FILE, None)
        return None if file is None or quiet else Relay(file)

    def tell(self, what: str, done: int, total: int) -> None:
        """As `pipegraph.progress.report_progress`."""
        self._write([what, done, total])

    def say(self, line: str) -> None:
        """Print on the parent's stdout."""
        self._write(line)

    def close(self) -> None:
        """There is nothing more to say."""
        self._file.close()

    def _write(self, told: object) -> None:
        self._file.write(json.dumps(told) + "\n")


@contextmanager
def relayed(say: Say) -> Iterator[None]:
    """Pass on what the children tell and print while the body runs, if somebody listens here.

    Where nobody reads what is printed any more, the body is interrupted as by Ctrl-C, and the OSError raised.
    """
    listener = current_listener()
    if listener is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="pipegraph-progress-") as folder:
        file, over, failed = Path(folder, "told"), threading.Event(), list[OSError]()
        file.touch()
        main = threading.main_thread().ident or 0

        def pass_on() -> None:
            try:
                _pass_on(file, over, listener, say)
            except OSError as error:
                failed.append(error)
                if not over.is_set():
                    signal.pthread_kill(main, signal.SIGINT)

        reader = threading.Thread(target=pass_on, name="progress", daemon=True)
        os.environ[_FILE] = str(file)
        reader.start()
        try:
            yield
        finally:
            os.environ.pop(_FILE, None)
            over.set()
            reader.join()
            if failed:
                raise failed[0]


def _pass_on(file: Path, over: threading.Event, listener: Listener, say: Say) -> None:
    with file.open(encoding="utf-8") as told:
        rest, last = "", False
        while not last:
            last = over.wait(_OFTEN)  # then there is nothing more to come
            *lines, rest = (rest + told.read()).split("\n")
            for line in map(json.loads, lines):
                say(line) if isinstance(line, str) else listener(*line)
