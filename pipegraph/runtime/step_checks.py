"""What the records of all ranks must have in common. Pure functions: each rank calls them with the same records, and so
raises the same error."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

from pipegraph.errors import BatchError, PipegraphError, RuntimeFault
from pipegraph.package.sizes import BATCH
from pipegraph.runtime.checksums import ABSENT
from pipegraph.runtime.processes.rank_grid import DATA, PIPELINE, TENSOR, RankGrid
from pipegraph.runtime.step_record import RecordLayout, StepRecord
from pipegraph.runtime.step_sizes import describe_tables, even_rows, microbatch_tables

SAME_BATCH: Final = (PIPELINE, TENSOR)
"""The dimensions along which ranks are given the same batch."""

SAME_STAGES: Final = (*DATA, TENSOR)
"""The dimensions along which ranks hold the same stages, whole or in part."""

Tables = list[dict[str, int]]
"""The sizes of each microbatch."""

_ADVICE: Final = (
    "Try: the same batch on all of them. A sampler or a seed that depends on the rank has to depend on pipe.dp_rank "
    "alone, its place among the data-parallel ranks"
)


def check_calls(records: Sequence[StepRecord], grid: RankGrid) -> None:
    """Raise RuntimeFault if ranks are in different calls, or in different regions of autocast."""
    first, everyone = records[0], range(len(records))
    if any((record.number, record.evaluates) != (first.number, first.evaluates) for record in records):
        calls = _by_rank(grid, everyone, lambda rank: f"its call {records[rank].number}, {records[rank].kind},")
        raise RuntimeFault(
            f"ranks are in different calls: {calls}.\n"
            "Try: the same calls of the pipeline on all ranks, in the same order; look for one that only some make."
        )
    if any(record.autocast != first.autocast for record in records):
        regions = _by_rank(grid, everyone, lambda rank: _autocast(records[rank].autocast))
        raise RuntimeFault(
            f"ranks make this call in different regions of torch.autocast: {regions}.\n"
            "Try: the same region, with the same dtype, on all ranks; or no region on any."
        )
    for line in grid.lines(*SAME_STAGES):
        if len({records[rank].loss for rank in line}) > 1:
            losses = _by_rank(grid, line, lambda rank: "a loss" if records[rank].loss else "no loss")
            raise RuntimeFault(
                f"ranks are in different calls: one for {losses}.\n"
                "Try: the target on all ranks that have the last stage, or on none of them."
            )


def check_training(records: Sequence[StepRecord]) -> None:
    """Raise PipegraphError if no parameter of any rank is trained in a step of training."""
    if not any(record.trains for record in records):
        raise PipegraphError(
            "no parameter of any stage requires a gradient, so that a step would train nothing.\n"
            "Try: requires_grad_() of what is to be trained, or pipe.evaluate(…, target=…) for the loss alone."
        )


def trained_ranks_that_differ(records: Sequence[StepRecord], grid: RankGrid) -> tuple[int, ...]:
    """The ranks of a line that hold the same stages and train different parameters; empty if there are none."""
    lines = grid.lines(*SAME_STAGES)
    return next((line for line in lines if len({records[rank].trained for rank in line}) > 1), ())


def trained_error(line: Sequence[int], texts: Sequence[str], grid: RankGrid) -> RuntimeFault:
    """The error for ranks that train different parameters.

    Args:
        texts: of every rank, the names of its trained parameters, one a line.
    """
    trained = {rank: dict.fromkeys(texts[rank].splitlines()) for rank in line}
    names = dict.fromkeys(name for listed in trained.values() for name in listed)
    differing = [name for name in names if not all(name in listed for listed in trained.values())]
    first, further = differing[0], f", and so do {len(differing) - 1} more parameters" if len(differing) > 1 else ""
    does = ", ".join(grid.text(rank) for rank in line if first in trained[rank])
    does_not = ", ".join(grid.text(rank) for rank in line if first not in trained[rank])
    return RuntimeFault(
        f"{first} requires a gradient on {does}, and not on {does_not}{further}. These ranks hold the same stages.\n"
        "Try: the same requires_grad_() on all of them, between the same steps."
    )


def agreed_tables(
    records: Sequence[StepRecord], grid: RankGrid, layout: RecordLayout, min_rows: int = 1
) -> dict[tuple[int, ...], Tables]:
    """The sizes of each microbatch, as far as any rank knows them, by the ranks of a pipeline.

    All pipelines have the least number of microbatches of any of them, because each rank sends and reduces in the order
    of one schedule.

    Raises:
        RuntimeFault: ranks of a pipeline were given batches of different sizes.
        BatchError: pipelines were given lists of different numbers of microbatches, or too few rows.
    """
    pipelines = grid.lines(*SAME_BATCH)
    tables = {line: _pipeline_tables(records, line, grid, layout, min_rows) for line in pipelines}
    count = min(map(len, tables.values()))
    if all(len(table) == count for table in tables.values()):
        return tables
    for line, table in tables.items():
        if len(table) == count:
            continue
        if any(records[rank].has_lists for rank in line):
            counts = _by_rank(grid, [line[0] for line in pipelines], lambda rank: str(_count_of(tables, rank)))
            raise BatchError(
                "data-parallel ranks were given lists of different numbers of microbatches, or too few rows for them: "
                f"{counts}.\nTry: the same number on all of them; they may differ in their rows."
            )
        rows = sum(sizes.get(BATCH, 0) for sizes in table)
        parts = even_rows(rows, count)
        tables[line] = [
            {**sizes, BATCH: part} if BATCH in sizes else sizes for sizes, part in zip(table, parts, strict=False)
        ]
    return tables


def _count_of(tables: Mapping[tuple[int, ...], Tables], rank: int) -> int:
    return next(len(table) for line, table in tables.items() if rank in line)


def _pipeline_tables(
    records: Sequence[StepRecord], line: Sequence[int], grid: RankGrid, layout: RecordLayout, min_rows: int
) -> Tables:
    """The sizes of each microbatch of one pipeline, merged from those that its ranks know."""
    microbatches, sizes = records[line[0]].microbatches, records[line[0]].sizes
    if all(records[rank].microbatches == microbatches and records[rank].sizes == sizes for rank in line):
        return microbatch_tables(layout.decode_sizes(sizes), microbatches, min_rows)
    if any(records[rank].microbatches != microbatches for rank in line):
        counts = _by_rank(grid, line, lambda rank: str(records[rank].microbatches))
        raise RuntimeFault(
            f"ranks of one pipeline were asked for different numbers of microbatches: {counts}.\n"
            "Try: the same number on all of them: microbatches=, or lists of equal lengths."
        )
    sizes_by_rank = {rank: layout.decode_sizes(records[rank].sizes) for rank in line}
    local = {rank: microbatch_tables(sizes_by_rank[rank], microbatches, min_rows) for rank in line}
    count = min(map(len, local.values()))
    merged: Tables = [{} for _ in range(count)]
    for tables in local.values():
        if len(tables) != count and any(BATCH in table for table in tables):
            raise _sizes_error(grid, local)
        for table, local_table in zip(merged, tables, strict=False):
            if any(table.setdefault(name, size) != size for name, size in local_table.items()):
                raise _sizes_error(grid, local)
    return merged


def _sizes_error(grid: RankGrid, local: Mapping[int, Tables]) -> RuntimeFault:
    sizes = _by_rank(grid, list(local), lambda rank: describe_tables(local[rank]))
    return RuntimeFault(f"ranks of one pipeline were given batches of different sizes: {sizes}.\n{_ADVICE}.")


def check_inputs(records: Sequence[StepRecord], grid: RankGrid, inputs: Sequence[str]) -> None:
    """Raise RuntimeFault if ranks of one pipeline were given different values of an input, or in another order.

    Args:
        inputs: the names of the checksums.
    """
    for line in grid.lines(*SAME_BATCH):
        first = records[line[0]]
        if all(
            records[rank].checksums == first.checksums and records[rank].checksum_call == first.checksum_call
            for rank in line
        ):
            continue
        for place, name in enumerate(inputs):
            sums = {rank: records[rank].checksums[place] for rank in line}
            ranks = [rank for rank in line if sums[rank] != ABSENT and records[rank].checksum_call > 0]
            if len({records[rank].checksum_call for rank in ranks}) > 1 or len({sums[rank] for rank in ranks}) < 2:
                continue
            groups = " against ".join(
                ", ".join(grid.text(rank) for rank in ranks if sums[rank] == number)
                for number in dict.fromkeys(sums[rank] for rank in ranks)
            )
            is_late = records[ranks[0]].checksum_call < records[ranks[0]].number
            call = " in the call before this one" if is_late else ""
            raise RuntimeFault(
                f"ranks of one pipeline were given different values of {name}{call}, or the same rows in another "
                f"order: {groups}.\n{_ADVICE}; or None for inputs that the stages of a rank do not "
                "take; or check_inputs=False if the difference does not matter."
            )


def _autocast(number: int) -> str:
    return "none" if number == 0 else f"one of {('float16', 'bfloat16', 'float32', 'float64')[number - 1]}"


def _by_rank(grid: RankGrid, ranks: Sequence[int] | range, text_of: Callable[[int], Hashable]) -> str:
    """``4 on rank 0, rank 1; 2 on rank 2``."""
    groups: dict[Any, list[str]] = {}
    for rank in ranks:
        groups.setdefault(text_of(rank), []).append(grid.text(rank))
    return "; ".join(f"{text} on {', '.join(names)}" for text, names in groups.items())
