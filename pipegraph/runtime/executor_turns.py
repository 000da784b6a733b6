"""One step of all executors of a process, each of which runs until it waits for another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipegraph.errors import RuntimeFault
from pipegraph.runtime.executor import Executor
from pipegraph.runtime.step_inputs import StepInputs
from pipegraph.runtime.step_state import StepOutputs


def run_executors(executors: Sequence[Executor], inputs: StepInputs, results: StepOutputs) -> None:
    """Do one step of every executor of this process: one under a launcher, all of them in turns in a plain process.

    Each continues until it needs what another of them has yet to send.
    """
    runs: list[tuple[Executor, Iterator[Any]]] = [(executor, executor.run(inputs, results)) for executor in executors]
    for executor in executors:
        executor.position = 0  # not where a step that failed has ended
    try:
        while runs:
            positions = [executor.position for executor, _ in runs]
            waiting = [(executor, run) for executor, run in runs if next(run, "done") is None]
            if len(waiting) == len(runs) and positions == [executor.position for executor, _ in waiting]:
                at = ", ".join(f"rank {waiter.rank} at {waiter.actions[waiter.position]}" for waiter, _ in waiting)
                raise RuntimeFault(
                    f"the schedule deadlocks: every rank waits for another one ({at}).\n"
                    "Try: pipegraph schedule FILE, which checks it."
                )
            runs = waiting
    finally:
        for executor in executors:
            executor.clear()
