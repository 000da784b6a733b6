"""A progress bar on stderr: only on a terminal, and only for work that takes over a second."""

from __future__ import annotations

import io
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from pipegraph.progress import listen
from pipegraph.report.text import clip
from pipegraph.runtime.processes.launch import PrintLine, ProgressRelay

_DELAY = 1.0  # seconds before a bar is shown
_WIDTH = 28  # columns of a bar, in a terminal with room for its label as well
_LABEL = 44  # columns next to a bar
_BEGAN = time.monotonic()  # the command's time, which continues from one bar to the next
_current_bar: _TerminalBar | None = None


@contextmanager
def progress(doing: str, quiet: bool = False) -> Iterator[PrintLine]:
    """Show what is being done while the body runs, with a bar if the amount of work is known.

    Yields a function that prints a line on stdout meanwhile. A process that `launch` started reports to its parent
    instead, if that has a terminal.

    Args:
        doing: what to show until `report_progress` says more.
        quiet: show nothing, as all ranks but one do.
    """
    global _current_bar
    relay = ProgressRelay.to_parent(quiet)
    if relay is not None:
        with closing(relay), listen(relay.report):
            yield relay.print
        return
    if quiet or not sys.stderr.isatty():
        yield partial(print, flush=True)
        return
    previous_bar, _current_bar = _current_bar, _TerminalBar(doing)
    try:
        with _current_bar, listen(_current_bar.update):
            yield _current_bar.print
    finally:
        _current_bar = previous_bar


def print_warning(line: str) -> None:
    """Print a line on stderr, above the bar."""
    if _current_bar is None:
        print(line, file=sys.stderr)
    else:
        _current_bar.print(line, error=True)


@dataclass(frozen=True)
class _Count:
    """How many of one kind are done of a round of them, and how many ``preceding`` it: a bar only moves forward."""

    preceding: int = 0
    done: int = 0
    total: int = 0

    def with_report(self, done: int, total: int) -> _Count:
        """Return the count with a report, which begins another round if this one is over or was of another size."""
        if total == self.total and (done >= self.done or self.done < self.total):
            return _Count(self.preceding, max(done, self.done), total)
        return _Count(self.preceding + self.done, done, total)


class _TerminalBar:
    """A line at the bottom of the terminal: what is being done, a bar, and the time so far."""

    def __init__(self, doing: str) -> None:
        self._task, self._done, self._total = doing, 0, 0
        self._counts: dict[str, _Count] = {}
        self._fractions: dict[str, float] = {}  # of a bar, which does not go back when there turns out to be more to do
        self._spinner = Spinner("dots")
        self._stderr = sys.stderr
        self._console = Console(file=self._stderr)
        self._live = self._new_live()
        self._lock = threading.Lock()
        self._is_closed = False
        self._timer = threading.Timer(_DELAY, self._start)
        self._timer.daemon = True

    def _new_live(self) -> Live:
        return Live(
            get_renderable=self._render,
            console=self._console,
            transient=True,
            refresh_per_second=10,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *raised: object) -> None:
        with _uninterrupted(), self._lock:
            self._is_closed = True
            self._timer.cancel()
            self._live.stop()

    def update(self, task: str, done: int, total: int) -> None:
        """Take a report of `pipegraph.progress.report_progress`."""
        count = self._counts.get(task, _Count()).with_report(done, total)
        self._task, self._counts[task] = task, count
        self._done, self._total = count.preceding + count.done, count.preceding + count.total
        if self._total:
            self._fractions[task] = max(self._fractions.get(task, 0.0), self._done / self._total)

    def print(self, line: str, error: bool = False) -> None:
        """Print above the bar."""
        with self._lock:
            is_shown = self._live.is_started
            with _uninterrupted():
                self._live.stop()
            print(line, file=self._stderr if error else sys.stdout, flush=True)
            if is_shown:
                with _uninterrupted():
                    self._live = self._new_live()  # the old one would take lines above for its own
                    self._live.start()

    def _start(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._live.start()

    def _render(self) -> Table:
        """One line, however narrow the terminal is: of a second one nothing would know when it is taken away."""
        task, done, total = self._task, self._done, self._total
        minutes, seconds = divmod(int(time.monotonic() - _BEGAN), 60)
        width = min(_WIDTH, max(self._console.width - _LABEL, 6))
        bar = (ProgressBar(1.0, self._fractions.get(task, 0.0), width),) if total else ()
        figures = (*([f"{done} of {total}"] if total else []), f"{minutes}:{seconds:02}")
        used_columns = 2 + (width + 1 if total else 0) + sum(len(figure) + 1 for figure in figures) + 1
        line = Table.grid(padding=(0, 1))
        label = f"{task}{'' if total else ' …'}"
        line.add_row(self._spinner, clip(label, max(self._console.width - used_columns, 1)), *bar, *figures)
        return line


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the body is done.

    A `Live` that is interrupted while it starts cannot be stopped, and would leave the terminal without a cursor.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])


@contextmanager
def hold_back_stderr(unless: bool) -> Iterator[None]:
    """Print what the body writes to stderr only if it succeeds, and silence its log.

    torch.export prints graphs and logs before it raises; the error that the user sees says what is in them.
    """
    if unless:
        yield
        return
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    buffer = io.StringIO()
    try:
        with redirect_stderr(buffer):
            yield
    finally:
        logging.disable(disabled)
    sys.stderr.write(buffer.getvalue())
