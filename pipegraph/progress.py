"""How far long work has come: told by whoever does it, to one listener, and to nobody unless there is one.

tell("compiling kernels", 3, 12)                      anywhere below
with told_to(bar.tell): …                             the command line, on a terminal
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

Listener = Callable[[str, int, int], None]
"""(what is being done, how many are done, of how many; 0 where nobody knows). It may be called from any thread."""

_Item = TypeVar("_Item")
_listener: Listener | None = None


def tell(what: str, done: int = 0, total: int = 0) -> None:
    """Say that so many of ``total`` are done. Costs nothing where nobody listens."""
    if _listener is not None:
        _listener(what, done, total)


def counted(what: str, items: Collection[_Item]) -> Iterator[_Item]:
    """The items, each told when the next one is asked for."""
    for done, item in enumerate(items):
        tell(what, done, len(items))
        yield item
    tell(what, len(items), len(items))


@contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Everything that is told in this process while the body runs goes to ``listener``."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def current() -> Listener | None:
    """Who listens."""
    return _listener
