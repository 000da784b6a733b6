"""A recorded loop over a mesh: what each rank runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

import pipegraph
from pipegraph.runtime.measurements import ActionTimes, Message
from pipegraph.schedule import Action, Collective
from tests.runtime.meshes import LENGTH, Shape, make

STEPS = 3  # one warms up, two are recorded


class CollectiveObserver:
    """An observer of collectives: (collective, begin, end) in the order in which it is told."""

    def __init__(self) -> None:
        self.collectives: list[tuple[str, float, float]] = []

    def begin(self, rank: int, action: Action) -> None:
        pass

    def end(self, rank: int, action: Action, saved: Any) -> None:
        pass

    def collective(
        self, rank: int, collective: Collective, begin: float, end: float, messages: Sequence[Message]
    ) -> None:
        self.collectives.append((str(collective), begin, end))


def record(rank: int, package: str, folder: str, shape: Shape, options: dict[str, Any]) -> dict[str, Any]:
    """The run's folder, the collectives of this rank's program, what an observer saw of the last step, and more."""
    pipe, _ = make(package, shape, "interleaved-1f1b", **options)
    tokens, target = torch.zeros(8, LENGTH, dtype=torch.int64), torch.zeros(8)
    with pipegraph.profile(pipe, folder, warmup=1, active=STEPS - 1) as profiler:
        for _ in range(STEPS):
            profiler.step(pipe.step(tokens, target=target))
    observer, times = CollectiveObserver(), ActionTimes(pipe.device)
    times.begin_step()
    with pipe.observe(observer), pipe.observe(times):
        pipe.step(tokens, target=target)
    rows = {place: [str(event.collective) for event in row] for place, row in times.end_step().collectives.items()}
    kinds = defaultdict(set)
    for stage, kind in times.medians():
        kinds[kind.value].add(stage)
    program = pipe.schedule_with_collectives.program(pipe.ranks[0])
    return {
        "folder": str(profiler.folder),
        "rank": rank,
        "place": pipe.ranks[0],
        "program": [str(operation) for operation in program if isinstance(operation, Collective)],
        "seen": observer.collectives,
        "kept": rows,
        "stages of gathers": kinds["UNSHARD"],
    }
