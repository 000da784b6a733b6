"""The hook into a rank's work: an observer sees every action begin and end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from torch.utils.hooks import RemovableHandle

from pipegraph.schedule import Action


class Observer(Protocol):
    """Sees every action of a step. Its calls come in the order of a rank's work, and never overlap on a rank.

    F, B, I and W last as long as the host takes to compute, or on a GPU to launch them. A SEND lasts as long as it
    takes to hand a message over. A RECV begins when its message is waited for, right before the action that uses it,
    and lasts as long as the wait. On a GPU all of it is on the current stream. An action that fails has no end.
    """

    def begin(self, rank: int, action: Action) -> None:
        """The rank begins an action."""
        ...

    def end(self, rank: int, action: Action, saved: Any) -> None:
        """The action is done. `saved` is what is held now for the backward of its stage and microbatch, or None."""
        ...


class NestedObservers:
    """Several observers as one. The first one begins first and ends last, so that it sees the time of all others."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def begin(self, rank: int, action: Action) -> None:
        for observer in self._observers:
            observer.begin(rank, action)

    def end(self, rank: int, action: Action, saved: Any) -> None:
        for observer in reversed(self._observers):
            observer.end(rank, action, saved)


class ObserverList:
    """The observers of a pipeline, and which of them see evals as well as steps."""

    def __init__(self) -> None:
        self._observers: OrderedDict[int, tuple[Observer, bool]] = OrderedDict()

    def add(self, observer: Observer, evals: bool) -> RemovableHandle:
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer, evals
        return handle

    def joined(self, is_eval: bool) -> Observer | None:
        """The observers of a step or an eval as one; None if there are none, so that nothing is looked at."""
        observers = [observer for observer, evals in self._observers.values() if evals or not is_eval]
        return NestedObservers(observers) if len(observers) > 1 else next(iter(observers), None)
