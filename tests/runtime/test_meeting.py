"""Ranks that meet before they are connected, as threads over one store."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from torch.distributed import HashStore, Store

from pipegraph.errors import PipegraphError, RuntimeFault
from pipegraph.runtime.processes.group import ConnectionLost
from pipegraph.runtime.processes.meeting import Meeting

RANKS = (4, 7, 9)  # of the default group, of which a pipeline has some


def together(*calls: Callable[[], object]) -> list[object]:
    """What the calls return or raise, each in a separate thread."""
    outcomes: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            outcomes[index] = calls[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return outcomes


def join(store: Store, rank: int, timeout: float = 5.0) -> Callable[[], object]:
    return Meeting(store, rank, RANKS, timeout).join


def test_each_meeting_has_a_store_of_its_own() -> None:
    store = HashStore()
    for meeting in range(3):
        stores = together(*[join(store, rank) for rank in RANKS])
        for meeting_store in stores:
            assert isinstance(meeting_store, Store)
            assert not meeting_store.check(["fault"])
        stores[0].set("fault", str(meeting))  # type: ignore[attr-defined]
        assert stores[2].get("fault") == str(meeting).encode()  # type: ignore[attr-defined]


def test_a_rank_that_does_not_come_is_named_and_can_come_later() -> None:
    store = HashStore()
    for error in together(join(store, 4, 0.2), join(store, 9, 0.2)):
        assert isinstance(error, RuntimeFault)
        assert str(error).startswith("rank 1 did not come within 0.2 s")
        assert isinstance(error.__cause__, ConnectionLost)  # so that a launcher blames the other rank
    assert all(isinstance(outcome, Store) for outcome in together(*[join(store, rank) for rank in RANKS]))


def test_a_rank_that_fails_before_is_named_and_can_try_again() -> None:
    store = HashStore()

    def fail() -> None:
        with Meeting(store, 7, RANKS, 5.0):
            raise PipegraphError("there is no GPU")

    failed = together(join(store, 4), fail, join(store, 9))
    assert str(failed[0]) == "rank 0 stopped: rank 1 failed: PipegraphError: there is no GPU"
    assert str(failed[1]) == "there is no GPU"
    assert str(failed[2]) == "rank 2 stopped: rank 1 failed: PipegraphError: there is no GPU"
    assert all(isinstance(outcome, Store) for outcome in together(*[join(store, rank) for rank in RANKS]))


def test_ranks_that_torchrun_started_again_find_nothing_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    (abandoned,) = together(lambda: Meeting(store, 4, RANKS, 0.1)._outcome(Meeting(store, 4, RANKS, 0.1)._store))
    assert abandoned == {"missing": [1, 2]}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert all(isinstance(outcome, Store) for outcome in together(*[join(store, rank) for rank in RANKS]))
