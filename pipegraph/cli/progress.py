"""What goes on, on stderr: only on a terminal, and only for work of over a second."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr

from rich.console import Console

_PATIENCE = 1.0  # seconds


@contextmanager
def progress(doing: str) -> Iterator[Callable[[str], None]]:
    """Show ``doing`` with a spinner while the body runs, from the second second on. Gives what shows something else."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda doing: None
        return
    status = console.status(f"{doing} …")
    timer = threading.Timer(_PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield status.update
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def held_back(unless: bool) -> Iterator[None]:
    """Hold back what the body prints to stderr until it succeeds, and its log altogether.

    torch.export prints graphs and logs before it raises; the error that reaches the user says what is in them.
    """
    if unless:
        yield
        return
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    finally:
        logging.disable(disabled)
    sys.stderr.write(said.getvalue())
