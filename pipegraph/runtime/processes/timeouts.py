"""Calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from pipegraph.errors import ArgumentError

_T = TypeVar("_T")

LONGEST: Final = 1e8
"""Seconds: three years. Torch takes a timeout in milliseconds that fit into 64 bits."""


def check_timeout(seconds: object) -> None:
    """Raise ArgumentError unless this is a number of seconds for which a rank can wait."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.001 <= seconds <= LONGEST:
        raise ArgumentError(
            f"timeout cannot be {seconds!r}: give the seconds that a rank waits for another one, from 0.001 to "
            f"{LONGEST:g}.\nTry: timeout=1800, which is longer than any step."
        )


def call_within(seconds: float, function: Callable[[], _T]) -> _T:
    """Return what `function` returns, or raise what it raises.

    Raises TimeoutError after `seconds`; the call then goes on in its thread, which does not keep the process alive.
    """
    result: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="pipegraph-timeout", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds} s")
    return result[0]
