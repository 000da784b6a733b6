"""Running the executors that one process holds: one under a launcher, all of them taking turns in a plain process."""

from __future__ import annotations

from collections.abc import Sequence

from pipegraph.errors import RuntimeFault
from pipegraph.runtime.executor import Executor
from pipegraph.runtime.step import Feed, Results


def drive(executors: Sequence[Executor], feed: Feed, results: Results) -> None:
    """One step of every executor. Each goes on until it needs what another of them has yet to send."""
    runs = [(executor, executor.run(feed, results)) for executor in executors]
    while runs:
        before = [executor.position for executor, _ in runs]
        waiting = [(executor, run) for executor, run in runs if next(run, "done") is None]
        if len(waiting) == len(runs) and before == [executor.position for executor, _ in waiting]:
            at = ", ".join(f"rank {executor.rank} at {executor.actions[executor.position]}" for executor, _ in waiting)
            raise RuntimeFault(f"the schedule deadlocks: every rank waits for another one ({at}). Check the schedule.")
        runs = waiting
