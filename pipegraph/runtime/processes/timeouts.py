"""Asking for what may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def within(seconds: float, ask: Callable[[], _T]) -> _T:
    """What `ask` returns, or raises. TimeoutError when that takes longer; `ask` is then left to itself."""
    answer: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(ask())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="pipegraph-patience", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not answer:
        raise TimeoutError(f"no answer within {seconds} s")
    return answer[0]
