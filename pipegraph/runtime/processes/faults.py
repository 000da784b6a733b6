"""How a rank that fails is named, by itself and by every other rank.

A rank that fails writes its fault to the store, where the first writer wins, and then closes its connections. Whoever
waits for it is woken by that, finds the origin in the store, and closes its own connections in turn; so all of them
stop, and name the same rank. A rank that was killed writes nothing: the one whose connection to it broke names it.

A rank that hangs breaks no connection. The first to wait for longer than the timeout writes that, and all stop as
before; but whom it waited for may have waited in turn. So every rank that stops signs for it, and the one that hangs is
the one that does not.

With NCCL nobody is woken: what waits is the GPU, and a peer that closes its side does not end that. There a thread of
each rank looks for a fault in the store, and aborts the connections itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from torch.distributed import Store

from pipegraph.errors import RuntimeFault, user_line
from pipegraph.runtime.processes.group import ConnectionLost
from pipegraph.runtime.processes.timeouts import within
from pipegraph.schedule import Action

_KEY: Final = "fault"
_SILENCE: Final = "silence"
_STORE_SECONDS: Final = 3.0
_SIGNING_SECONDS: Final = 2.0
_WATCHING_SECONDS: Final = 0.5
_STORE_GONE: Final = (
    "The process group's store does not answer either: the rank that hosts it (rank 0, unless torchrun does) is gone."
)


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
        self.has_failed = False
        """Whether what is closed need not wait for anything, as this rank or another one has failed."""
        self._rank = rank
        self._ranks = ranks
        self._store = store
        self._store_answers = True
        self._stopped: str | None = None
        self._lost: ConnectionLost | None = None  # where another rank's failure was found by the watching thread
        self._over = threading.Event()

    def __enter__(self) -> None:
        if self._stopped is not None:
            said = f"this pipeline stopped at an earlier failure; make a new one. {self._stopped}"
            raise RuntimeFault(said) from self._lost

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            if self._stopped is not None:  # meanwhile: what was computed is worth nothing
                raise RuntimeFault(self._stopped) from self._lost
            return
        self._over.set()  # the failure is told here, not by the watching thread as well
        said = self._explain(error)
        if self._store is not None:
            self.has_failed = True
            self.closing.close()
            said = self._stopped = f"{said}{self._hung()}"
        if isinstance(error, ConnectionLost):  # which the launcher looks for, to blame another rank
            raise RuntimeFault(said) from error
        if isinstance(error, ActionFailed):
            raise RuntimeFault(said) from (error.__cause__ or error)

    def watch(self, abort: Callable[[], None]) -> None:
        """Look for another rank's failure, in a thread that lives until this rank fails or is done. `abort` ends what
        this rank waits for; the rest is closed by whoever uses it."""
        threading.Thread(target=self._watch, args=(abort,), name="pipegraph-faults", daemon=True).start()

    def close(self) -> None:
        """Let go of all connections, as the process is done."""
        self._over.set()
        self.closing.close()

    def _watch(self, abort: Callable[[], None]) -> None:
        assert self._store is not None
        while not self._over.wait(_WATCHING_SECONDS):
            try:
                if not self._store.check([_KEY]):
                    continue
                fault = _text(self._store.get(_KEY))
                self._store.set(f"stopped/{self._rank}", "")
            except Exception:  # the store's host may be done with its work before this rank is
                return
            if not self._over.is_set():
                self.has_failed = True
                self._lost = ConnectionLost(None, fault)
                self._stopped = f"rank {self._rank} stopped: {fault}"
                # The host may be waiting for the GPU outside of any call, and come to none any more.
                logging.getLogger(__name__).error(self._stopped)
                abort()
                return

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
            return within(_STORE_SECONDS, write)
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
            within(_SIGNING_SECONDS + _STORE_SECONDS, look)
        except Exception:
            return ""
        if not 0 < len(missing) < self._ranks:
            return ""
        named = " and ".join(f"rank {rank}" for rank in sorted(missing))
        return f"\n  No word from {named}: it hangs, or computes for longer than the timeout."


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
