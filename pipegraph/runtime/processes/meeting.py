"""Where the ranks of a pipeline meet before they are connected: a rank that does not come is named.

Meetings have numbers, and the store says how each ended. A rank joins the first one that is not over, after it has
heard of each failure of another rank once. So ranks meet again after some of them failed, whatever they had done then.

rank 0   arrived ── waits ─────────────┐
rank 1       arrived ── waits ─────────┤ outcome: "complete", or what is wrong
rank 2               arrived, the last ┘
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist

from pipegraph import loopback
from pipegraph.errors import RuntimeFault
from pipegraph.runtime.processes.group import ConnectionLost, interruptible, lost_connections, wait_for_key
from pipegraph.runtime.processes.launched_rank import environment_ranks

STORE_GONE: Final = (
    "The process group's store does not answer either: the rank that hosts it (rank 0, unless torchrun does) is gone."
)
_OUTCOME: Final = "outcome"
_POLL_SECONDS: Final = 0.1


class Meeting(AbstractContextManager[None]):
    """A meeting of `ranks`, of which `rank` is this process's, at a store.

    As a context it tells the others of a failure of this rank that comes before it can `join` them. Messages name a
    rank by what `named` returns for its number among `ranks`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        named: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self._store = dist.PrefixStore(f"pipegraph/{restart_count()}/{'-'.join(map(str, ranks))}", store)
        self._rank = tuple(ranks).index(rank)
        self._count = len(ranks)
        self._timeout = timeout
        self._named = named
        self._heard = f"heard/{self._rank}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            message = f"{self._named(self._rank)} failed: {type(error).__name__}: {error}"
            store = self._next_meeting()
            store.set(self._heard, "")
            store.compare_set(_OUTCOME, "", json.dumps({"failed": message}))

    def join(self) -> dist.Store:
        """Wait until all ranks are here. Return the part of the store that belongs to this meeting.

        Raises RuntimeFault if a rank fails, or does not come in time.
        """
        while True:
            try:
                with lost_connections(None):
                    store = self._next_meeting()
                    outcome = self._outcome(store)
            except ConnectionLost as error:
                message = f"{self._named(self._rank)} stopped where the ranks meet: {error}. {STORE_GONE}"
                raise RuntimeFault(message) from error
            if "failed" in outcome:
                raise RuntimeFault(f"{self._named(self._rank)} stopped: {outcome['failed']}") from ConnectionLost(
                    None, ""
                )
            missing = outcome.get("missing", [])
            if not missing:
                return store
            if self._rank not in missing:  # else the others gave up just when this rank came, and may try again
                named = " and ".join(map(self._named, missing))
                message = (
                    f"{named} did not come within {self._timeout:g} s, and {self._named(self._rank)} has waited: not "
                    "started, stopped, or busy with something else.\nTry: a longer timeout if it is not hung."
                )
                raise RuntimeFault(message) from ConnectionLost(missing[0], "no answer in time", silent=True)

    def _next_meeting(self) -> dist.Store:
        number = 0
        while (store := dist.PrefixStore(str(number), self._store)).check([_OUTCOME]):
            if "failed" in json.loads(store.get(_OUTCOME)) and not store.check([self._heard]):
                break
            number += 1
        return store

    def _outcome(self, store: dist.Store) -> dict[str, Any]:
        store.set(f"here/{self._rank}", "")
        store.set(self._heard, "")
        if store.add("arrived", 1) == self._count:
            store.compare_set(_OUTCOME, "", json.dumps({}))
        try:
            with lost_connections(None):
                wait_for_key(store, _OUTCOME, self._timeout)
        except ConnectionLost as error:
            if not error.silent:
                raise
            missing = [rank for rank in range(self._count) if not store.check([f"here/{rank}"])]
            store.compare_set(_OUTCOME, "", json.dumps({"missing": missing}))
        outcome: dict[str, Any] = json.loads(store.get(_OUTCOME))
        return outcome


def restart_count() -> str:
    """How often torchrun has restarted the ranks. They may find the store of the attempts before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def environment_store(timeout: float) -> tuple[dist.Store, int, int]:
    """The store that a launcher's environment names, this process's rank, and how many there are.

    `torch.distributed.rendezvous` does the same, but its rank 0 waits inside for the others and cannot say which is
    missing.
    """
    rank, size = environment_ranks()
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        raise RuntimeFault(
            "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT, where the ranks meet.",
            "torchrun, which sets all four; or unset RANK to run all stages in this process.",
        )
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        raise RuntimeFault(f"MASTER_PORT is {port!r}, which is not a port.", "torchrun, which sets it; or 29500.")
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    try:
        if hosts and loopback.is_loopback(host):
            return loopback.open_store(host, int(port), size, timeout), rank, size
        if not hosts:
            _wait_for_listener(host, int(port), timeout)
        store = interruptible(
            lambda: dist.TCPStore(
                host,
                int(port),
                size,
                is_master=hosts,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
        )
    except (RuntimeError, OSError) as error:
        if hosts:
            raise RuntimeFault(
                f"rank 0 cannot open port {port} of {host}, where the ranks meet: {str(error).splitlines()[0]}",
                "another MASTER_PORT, and a MASTER_ADDR that is this machine.",
            ) from None
        raise RuntimeFault(
            f"rank {rank} found nobody at {host}:{port} within {timeout:g} s, where rank 0 or its launcher is to be: "
            "not started, stopped, or gone.",
            "a longer timeout if it is not hung.",
        ) from ConnectionLost(0, "no answer in time", silent=True)
    return store, rank, size


def _wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Wait until something listens at a port, and handle signals meanwhile, which a store does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=1.0).close()
            return
        time.sleep(_POLL_SECONDS)
