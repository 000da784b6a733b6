"""How a rank that fails is named, by itself and by every other rank.

A rank that fails writes its fault to the store, where the first writer wins, and then closes its connections. That
wakes every rank that waits for it. Each of them finds the first fault in the store and closes its own connections in
turn, so that all ranks stop and name the same one. A rank that was killed writes nothing: the rank whose connection to
it broke names it.

A rank that hangs breaks no connection. The first rank that waits longer than the timeout writes that, and all stop as
before. But the rank it waited for may itself have waited for another. So every rank that stops leaves a signature, and
the rank that hangs is the one without. A connection that breaks in a collective does not say who is gone either: it is
the rank without a signature.

With NCCL a closed connection wakes nobody, because the GPU waits and not the host. There a thread of each rank looks
for a fault in the store and aborts the connections.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from torch.distributed import Store

from pipegraph.arguments import argument, for_asker
from pipegraph.errors import PipegraphError, RuntimeFault, user_line
from pipegraph.runtime.processes.group import ConnectionLost, call_within
from pipegraph.runtime.processes.meeting import STORE_GONE
from pipegraph.runtime.processes.rank_grid import RankGrid
from pipegraph.schedule import Action

FAULT: Final = "fault"
_SILENCE: Final = "silence"
_LOSS: Final = "loss"
_STORE_SECONDS: Final = 3.0
_SIGNATURE_SECONDS: Final = 2.0
_WATCH_SECONDS: Final = 0.5
_LATER_SECONDS: Final = 2.0


class ActionFailed(Exception):
    """An action failed, or what is done `is_preparation` it. The cause is the exception that this one was raised from.

    `rank` is the schedule's: in a mesh, a coordinate.
    """

    def __init__(self, rank: int, actions: Sequence[Action], position: int, is_preparation: bool = False) -> None:
        action, first = actions[position], max(0, position - 5)
        self.rank = rank
        self.row = f"{'… ' if first else ''}{' '.join(map(str, actions[first : position + 1]))}"
        place = f"{'before ' if is_preparation else ''}action {action}"
        super().__init__(f"stage {action.stage}, {place}, microbatch {action.microbatch}")


class SendFailed(Exception):
    """A message to the rank `peer` could not be sent. The cause is the exception that this one was raised from."""

    def __init__(self, peer: int, where: str) -> None:
        super().__init__(f"a message to rank {peer} could not be sent")
        self.where = where


class FaultGuard:
    """A context around everything that a rank does together with others.

    A failure inside is reported to all ranks and ends this rank's part: the connections are closed, and entering again
    raises RuntimeFault. ActionFailed and ConnectionLost leave the context as RuntimeFault, anything else as it is.
    Without a store the process is alone, and can continue after a failure. Only one thread can be inside.

    Args:
        rank: this process's.
        grid: of all ranks.
        store: where all of them find faults.
    """

    def __init__(self, rank: int, grid: RankGrid, store: Store | None) -> None:
        self.closing = ExitStack()
        """Everything that is closed when this rank fails or ends."""
        self.has_failed = False
        """Whether this rank or another one has failed, so that closing need not wait for anything."""
        self._rank = rank
        self._grid = grid
        self._store = store
        self._store_answers = True
        self._fault: str | None = None
        self._lost: ConnectionLost | None = None  # set if the watching thread found another rank's failure
        self._over = threading.Event()
        self._call = threading.Lock()

    def __enter__(self) -> None:
        if not self._call.acquire(blocking=False):
            raise PipegraphError(
                "this pipeline is in another call already, of another thread or of what that call runs. It does one "
                "call at a time.",
                "a lock around its calls, or a Pipeline for each thread.",
            )
        if self._fault is not None:
            self._call.release()
            message = f"this pipeline stopped at an earlier failure; make a new one. {self._fault}"
            raise RuntimeFault(message) from self._lost

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self._leave(error)
        finally:
            self._call.release()

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            if self._fault is not None:  # another rank failed meanwhile, and what was computed is worth nothing
                raise RuntimeFault(self._fault) from self._lost
            return
        self._over.set()  # the failure is reported here, not by the watching thread as well
        message = self._explain(error)
        if self._store is not None:
            self.has_failed = True
            self.closing.close()
            message = self._fault = f"{message}{self._silent_ranks()}"
        cause = (error.__cause__ or error) if isinstance(error, ActionFailed) else error
        if isinstance(cause, ConnectionLost) and self._store is not None:
            wait_for_the_first_failure()
        if isinstance(error, (ActionFailed, ConnectionLost, SendFailed)):
            # The launcher looks for the cause ConnectionLost, to blame another rank.
            raise RuntimeFault(message) from ((cause.__cause__ or cause) if isinstance(cause, SendFailed) else cause)

    def report(self, failure: SendFailed) -> None:
        """Report a failure in another thread than the one that is inside, which is not ended by this."""
        where = f" in {failure.where}" if failure.where else ""
        self._report(_fault(self._grid.text(self._rank), failure.__cause__ or failure, where))

    def watch(self, abort: Callable[[], None]) -> None:
        """Look for another rank's failure in a thread, until this rank fails or is done.

        `abort` ends the operation that this rank waits for. All other connections are closed by their users.
        """
        threading.Thread(target=self._watch, args=(abort,), name="pipegraph-faults", daemon=True).start()

    def close(self) -> None:
        """Close all connections, because the process is done."""
        self._over.set()
        self.closing.close()

    def _watch(self, abort: Callable[[], None]) -> None:
        assert self._store is not None
        while not self._over.wait(_WATCH_SECONDS):
            try:
                if not self._store.check([FAULT]):
                    continue
                fault = _text(self._store.get(FAULT))
                self._sign(self._store)
            except Exception:  # the store's host may be done with its work before this rank is
                return
            if not self._over.is_set():
                self.has_failed = True
                self._lost = ConnectionLost(None, fault)
                self._fault = f"{self._grid.text(self._rank)} stopped: {fault}"
                # The host may wait for the GPU outside of any call of the pipeline, and never make another one.
                logging.getLogger(__name__).error(self._fault)
                abort()
                return

    def _explain(self, error: BaseException) -> str:
        """Report a failure to all ranks. Return the message: which rank failed first, and where this one stopped."""
        rank, where, row, cause = self._grid.text(self._rank), "", "", error
        if isinstance(error, ActionFailed):
            if self._store is None:  # all ranks of the schedule are in this process
                rank = f"rank {error.rank}"
            where, row = f" in {error}", f"\n  {rank}: {error.row}  <-- ERROR HERE"
            cause = error.__cause__ or error
        if isinstance(cause, ConnectionLost):
            peer = "another rank" if cause.peer is None else self._grid.text(cause.peer)
            where = where or (f" in {cause.where}" if cause.where else "")
            if cause.silent:
                longer = for_asker("Give Pipeline a longer timeout", f"Give a longer {argument('timeout')}")
                hint = f"{longer} if it is not hung."
                if where.endswith("()"):  # a call, and no action
                    hint = f"Every rank has to make this call. {hint}"
                fault, kind = f"{rank} waited for {peer}{where}: {cause}. {hint}", _SILENCE
            else:
                fault = f"{peer} is gone ({cause}) while {rank} waited for it{where}. Was it killed?"
                kind = _LOSS if cause.peer is None else ""
            awaited = "" if cause.peer is None else f", waiting for {peer}"
            return f"{rank} stopped{where}{awaited}: {self._report(fault, kind)}{row}"
        if isinstance(cause, SendFailed):
            where, row = f" in {cause.where}" if cause.where else where, ""
            cause = cause.__cause__ or cause
        local_fault = _fault(rank, cause, where)
        first = self._report(local_fault)
        if not first.startswith(local_fault):
            return f"{local_fault}{row}\n  Before that, {first}"
        problem, advice, how = local_fault.partition("\nTry:")
        return f"{problem}{row}{advice}{how}"

    def _report(self, fault: str, kind: str = "") -> str:
        """Write `fault` to the store, unless another rank's is there. Return the one that was there first.

        A fault of the kind `_SILENCE` or `_LOSS` does not say itself which rank is to blame.
        """
        store = self._store
        if store is None:
            return fault

        def write() -> str:
            first = _text(store.compare_set(FAULT, "", fault))
            if kind and first == fault:
                store.set(kind, "")
            self._sign(store)
            return first

        try:  # a store whose host is stopped answers nothing at all
            return call_within(_STORE_SECONDS, write)
        except Exception:
            self._store_answers = False
            return f"{fault} {STORE_GONE}"

    def _sign(self, store: Store) -> None:
        store.set(f"stopped/{self._rank}", "")

    def _silent_ranks(self) -> str:
        """A sentence that names the ranks that do not stop, if the fault does not say which rank is to blame."""
        store = self._store
        if store is None or not self._store_answers:
            return ""
        missing, kinds = set(range(self._grid.size)), set[str]()

        def wait_for_signatures() -> None:
            end = time.monotonic() + _SIGNATURE_SECONDS
            kinds.update(kind for kind in (_SILENCE, _LOSS) if store.check([kind]))
            while kinds and missing and time.monotonic() < end:
                missing.difference_update([rank for rank in missing if store.check([f"stopped/{rank}"])])
                time.sleep(0.05)

        try:
            call_within(_SIGNATURE_SECONDS + _STORE_SECONDS, wait_for_signatures)
        except Exception:
            return ""
        if not kinds or not 0 < len(missing) < self._grid.size:
            return ""
        named = " and ".join(map(self._grid.text, sorted(missing)))
        if _LOSS in kinds:
            return f"\n  No word from {named}: it is gone."
        return f"\n  No word from {named}: it hangs, or computes for longer than the timeout."


def _fault(rank: str, cause: BaseException, where: str) -> str:
    line = user_line(cause)
    problem, advice, how = str(cause).partition("\nTry:")
    return f"{rank} failed{where}: {type(cause).__name__}: {problem}{f' (at {line})' if line else ''}{advice}{how}"


def wait_for_the_first_failure() -> None:
    """Let this process end after the rank that failed first, if it is torchrun that waits for both.

    torchrun blames the rank that it sees end first, and ends all others then.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end = time.monotonic() + _LATER_SECONDS
        atexit.register(lambda: time.sleep(max(0.0, end - time.monotonic())))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
