"""The hook into a rank's work: an observer sees every action begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pipegraph.schedule import Action


class Observer(Protocol):
    """Is told of every action of a step: its calls stand in the order of the rank's work, and never overlap on a rank.

    F, B, I and W last as long as the host takes to compute, or on a GPU to launch them; a SEND as long as it takes to
    hand a message over. A RECV is told of when its message is waited for, right before the action that uses it, and
    lasts as long as the wait. On a GPU all of it is on the current stream. An action that fails has no end.
    """

    def begin(self, rank: int, action: Action) -> None:
        """The rank turns to an action."""
        ...

    def end(self, rank: int, action: Action, saved: Any) -> None:
        """It is done, and holds `saved` for the backward of the action's stage and microbatch; None: nothing."""
        ...


class Observers:
    """Several observers as one: each one's time around an action lies within that of the one before it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def begin(self, rank: int, action: Action) -> None:
        for observer in self._observers:
            observer.begin(rank, action)

    def end(self, rank: int, action: Action, saved: Any) -> None:
        for observer in reversed(self._observers):
            observer.end(rank, action, saved)
