"""How a rank that fails is named, by itself and by every other rank.

A rank that fails writes its fault to the store, where the first writer wins, and then closes its connections. Whoever
waits for it is woken by that, finds the origin in the store, and closes its own connections in turn; so all of them
stop, and name the same rank. A rank that was killed writes nothing: the one whose connection to it broke names it.

A rank that hangs breaks no connection. The first to wait for longer than the timeout writes that, and all stop as
before; but whom it waited for may have waited in turn. So every rank that stops signs for it, and the one that hangs is
the one that does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, TypeVar

from torch.distributed import Store

from pipegraph.errors import RuntimeFault, user_line
from pipegraph.runtime.transport import ConnectionLost
from pipegraph.schedule import Action

_KEY: Final = "fault"
_SILENCE: Final = "silence"
_STORE_SECONDS: Final = 3.0
_SIGNING_SECONDS: Final = 2.0
_STORE_GONE: Final = (
    "The process group's store does not answer either: the rank that hosts it (rank 0, unless torchrun does) is gone."
)
_T = TypeVar("_T")


class ActionFailed(Exception):
    """An action failed, for the reason that this was raised from."""

    def __init__(self, rank: int, actions: Sequence[Action], position: int) -> None:
        action, first = actions[position], max(0, position - 5)
        self.rank = rank
        self.row = f"rank {rank}: {'… ' if first else ''}{' '.join(map(str, actions[first : position + 1]))}"
        super().__init__(f"stage {action.stage}, action {action}, microbatch {action.microbatch}")


class Guard:
    """Around all that a rank does together with others: what fails inside is told to all, and ends this rank's part.

    ActionFailed and ConnectionLost leave it as RuntimeFault, anything else as it is. After a failure nothing can be
    done inside any more. Without a store the process is alone, and can go on.
    """

    def __init__(self, rank: int, ranks: int, store: Store | None) -> None:
        self.closing = ExitStack()
        """What is to be closed when this rank fails, or is done."""
        self._rank = rank
        self._ranks = ranks
        self._store = store
        self._store_answers = True
        self._stopped: str | None = None

    def __enter__(self) -> None:
        if self._stopped is not None:
            raise RuntimeFault(f"this pipeline stopped at an earlier failure; make a new one. {self._stopped}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        said = self._explain(error)
        if self._store is not None:
            self.closing.close()
            said = self._stopped = f"{said}{self._hung()}"
        if isinstance(error, ConnectionLost):  # which the launcher looks for, to blame another rank
            raise RuntimeFault(said) from error
        if isinstance(error, ActionFailed):
            raise RuntimeFault(said) from (error.__cause__ or error)

    def close(self) -> None:
        """Let go of all connections, as the process is done."""
        self.closing.close()

    def _explain(self, error: BaseException) -> str:
        """Report a failure, and say it in full: who failed first, and where this rank stopped for it."""
        rank, where, row, cause = self._rank, "", "", error
        if isinstance(error, ActionFailed):
            rank, where, row = error.rank, f" in {error}", f"\n  {error.row}  <-- ERROR HERE"
            cause = error.__cause__ or error
        if isinstance(cause, ConnectionLost):
            who = "another rank" if cause.peer is None else f"rank {cause.peer}"
            where = where or (f" in {cause.where}" if cause.where else "")
            if cause.silent:
                fault = (
                    f"rank {rank} waited for {who}{where}: {cause}. Give Pipeline a longer timeout if it is not hung."
                )
            else:
                fault = f"{who} is gone ({cause}) while rank {rank} waited for it{where}. Was it killed?"
            awaited = "" if cause.peer is None else f", waiting for {who}"
            return f"rank {rank} stopped{where}{awaited}: {self._report(fault, cause.silent)}{row}"
        line = user_line(cause)
        own = f"rank {rank} failed{where}: {type(cause).__name__}: {cause}{f' (at {line})' if line else ''}"
        first = self._report(own)
        return f"{own}{row}" if first.startswith(own) else f"{own}{row}\n  Before that, {first}"

    def _report(self, fault: str, silent: bool = False) -> str:
        """Write `fault` where all ranks find it, unless another was there first; the first one is returned."""
        store = self._store
        if store is None:
            return fault

        def write() -> str:
            first = _text(store.compare_set(_KEY, "", fault))
            if silent and first == fault:
                store.set(_SILENCE, "")
            store.set(f"stopped/{self._rank}", "")
            return first

        try:  # in a thread, because a store whose host is stopped answers neither yes nor no
            return _within(_STORE_SECONDS, write)
        except Exception:
            self._store_answers = False
            return f"{fault} {_STORE_GONE}"

    def _hung(self) -> str:
        """A sentence that names the ranks that do not stop, where that is for one that hangs."""
        store = self._store
        if store is None or not self._store_answers:
            return ""
        missing = set(range(self._ranks))

        def look() -> None:
            end = time.monotonic() + _SIGNING_SECONDS
            while store.check([_SILENCE]) and missing and time.monotonic() < end:
                missing.difference_update([rank for rank in missing if store.check([f"stopped/{rank}"])])
                time.sleep(0.05)

        try:
            _within(_SIGNING_SECONDS + _STORE_SECONDS, look)
        except Exception:
            return ""
        if not 0 < len(missing) < self._ranks:
            return ""
        named = " and ".join(f"rank {rank}" for rank in sorted(missing))
        return f"\n  No word from {named}: it hangs, or computes for longer than the timeout."


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _within(seconds: float, ask: Callable[[], _T]) -> _T:
    """What `ask` returns, or raises. TimeoutError when that takes longer; `ask` is then left to itself."""
    answer: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(ask())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="pipegraph-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not answer:
        raise TimeoutError(f"no answer within {seconds} s")
    return answer[0]
