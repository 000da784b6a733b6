"""Progress of long work: the code that works reports it to the listener, if there is one.

report_progress("compiling kernels", 3, 12)           anywhere below
with listen(bar.update): …                            the command line, on a terminal
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

Listener = Callable[[str, int, int], None]
"""Called with (what is being done, how many are done, of how many; 0 if unknown), from any thread."""

_Item = TypeVar("_Item")
_listener: Listener | None = None


def report_progress(task: str, done: int = 0, total: int = 0) -> None:
    """Report that ``done`` of ``total`` items are done. Does nothing without a listener."""
    if _listener is not None:
        _listener(task, done, total)


def track(task: str, items: Collection[_Item]) -> Iterator[_Item]:
    """Yield the items, and report how many are done before each of them and after the last."""
    for done, item in enumerate(items):
        report_progress(task, done, len(items))
        yield item
    report_progress(task, len(items), len(items))


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Send every report of this process to ``listener`` while the body runs."""
    global _listener
    previous_listener, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = previous_listener


def current_listener() -> Listener | None:
    """Return the current listener, or None."""
    return _listener
