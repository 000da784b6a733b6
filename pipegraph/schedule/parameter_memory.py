"""The bytes that a rank holds of parameters and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from pipegraph.errors import ScheduleError
from pipegraph.schedule.collective_stream import MemorySpan, RankCollectives
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.simulate import simulate
from pipegraph.schedule.times import Times


class ParameterBytes(NamedTuple):
    """What a rank holds."""

    at_rest: float
    """between steps: the shards of its sharded stages, the parameters of the others"""
    parameters: float
    """the most within a step: what is at rest, and the whole parameters that were gathered"""
    with_gradients: float
    """the most within a step of this and of gradients that are not yet reduced, without those of one microbatch that a
    backward has made and has yet to add to them"""


def parameter_bytes(
    schedule: Schedule, times: Times, whole: Sequence[float], shards: Sequence[float], exchanged: bool = False
) -> tuple[ParameterBytes, ...]:
    """Return the bytes of parameters and of unreduced gradients on each rank. A gradient is as large as its parameter.

    A stage that is not sharded reduces its gradients in place. These gradients, and reduced shards, stay in memory and
    are not counted.

    Args:
        schedule: with its collectives, as `lower` returns it.
        whole, shards: for each stage, the bytes of its whole parameters, and of the part that a rank keeps.
        exchanged: whether the ranks exchange gradients, as over gloo, which takes the memory of a stage's once more
            from its REDUCE_GRAD on; NCCL adds them up on the way.

    Raises ScheduleError as `simulate` does, and if ``whole`` or ``shards`` does not have one figure per stage.
    """
    for name, figures in (("whole", whole), ("shards", shards)):
        if len(figures) != schedule.stages:
            raise ScheduleError(
                f"{name} holds bytes, one figure per stage: {schedule.name} has {schedule.stages} stages, "
                f"and {len(figures)} were given."
            )
    stage_bytes = [shards[stage] if stage in schedule.sharded else whole[stage] for stage in range(schedule.stages)]
    at_rest = [0.0] * schedule.ranks
    for stage, rank in enumerate(schedule.placement):
        at_rest[rank] += stage_bytes[stage]
    collectives = simulate(schedule, times).collectives
    if not collectives:
        return tuple(ParameterBytes(rank_bytes, rank_bytes, rank_bytes) for rank_bytes in at_rest)
    return tuple(
        ParameterBytes(
            rank_bytes,
            rank_bytes + _peak(_changes(rank_collectives.parameters, whole)),
            rank_bytes + _peak(_with_gradients(rank_collectives, schedule, whole, exchanged)),
        )
        for rank_bytes, rank_collectives in zip(at_rest, collectives, strict=True)
    )


class _Change(NamedTuple):
    """What is held becomes more or less. Changes at one time come in the order of ``rank``."""

    time: float
    rank: int
    size: float


def _changes(spans: Iterable[MemorySpan], size: Sequence[float]) -> Iterator[_Change]:
    """What ends at a time makes room for what starts then."""
    for span in spans:
        yield _Change(span.start, 2, size[span.stage])
        yield _Change(span.end, 0, -size[span.stage])


def _with_gradients(
    collectives: RankCollectives, schedule: Schedule, size: Sequence[float], exchanged: bool
) -> Iterator[_Change]:
    yield from _changes(collectives.parameters, size)
    for span in collectives.gradients:
        if span.stage in schedule.sharded:
            yield _Change(span.start, 4, size[span.stage])
            yield _Change(span.end, 3 if exchanged else 0, -size[span.stage])
    for span in collectives.reductions if exchanged else ():
        if span.stage in schedule.sharded:
            yield _Change(span.start, 2, size[span.stage])  # after the stage's parameters were freed
            yield _Change(span.end, 3, -size[span.stage])


def _peak(changes: Iterable[_Change]) -> float:
    return max(accumulate(change.size for change in sorted(changes)), default=0.0)
