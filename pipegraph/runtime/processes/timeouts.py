"""Calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


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
