"""What `repr` shows of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipegraph.errors import one_line
from pipegraph.schedule import Schedule
from pipegraph.units import format_number_of


def describe_pipeline(
    package: str, schedule: Schedule, ranks: Sequence[int], stages: Iterable[int], device: object, kernels: str
) -> str:
    """Return the package, the schedule, and what of it this process holds, in a line.

    Pipeline(small: zb-v with 8 microbatches; stages 0, 3 of 4 on rank 0 of 2, cpu, kernels inductor)
    """
    microbatches, stage_names = format_number_of("microbatch", schedule.microbatches), [*map(str, stages)]
    holds = f"stage{'' if len(stage_names) == 1 else 's'} {', '.join(stage_names)} of {schedule.stages}"
    where = f"rank {ranks[0]} of {schedule.ranks}"
    if len(ranks) == schedule.ranks:
        holds, where = f"all {format_number_of('stage', schedule.stages)}", f"{format_number_of('rank', len(ranks))}"
        where += " in one process"
    return one_line(
        f"Pipeline({package}: {schedule.name} with {microbatches}; {holds} on {where}, {device}, kernels {kernels})"
    )
