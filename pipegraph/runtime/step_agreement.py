"""The agreement of all ranks on a step: one record of each is gathered and checked before anything is computed.

local batch ─▶ StepRecord ─ gathered from all ranks ─▶ checks ─▶ AgreedStep: the sizes of all microbatches, the weight
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from pipegraph.errors import BatchError, PipegraphError, RuntimeFault
from pipegraph.kernels.autocast import autocast_number
from pipegraph.package import CALLER, Manifest
from pipegraph.package.sizes import BATCH
from pipegraph.runtime.batch import ShownSizes, StepBatch, describe_tables, even_rows, microbatch_tables
from pipegraph.runtime.checksums import ABSENT, Checksums, checksum
from pipegraph.runtime.parameters import parameters_of
from pipegraph.runtime.processes.group import Group, PendingGather
from pipegraph.runtime.processes.rank_grid import DATA, DIMENSIONS, PIPELINE, TENSOR, RankGrid
from pipegraph.runtime.processes.world import fingerprint
from pipegraph.runtime.rank_context import RankContext

# ---- step record -----------------------------------------------------------------------------------------------------
# The record of a rank in a step: all that other ranks have to know of its call, as a vector of fixed length.


ROOM: Final = 96
"""The sizes of microbatches that fit into a record. A longer list follows it in a separate message."""

_UNKNOWN: Final = -1
_FIELDS: Final = 10
_COUNT: Final = 8  # the place of the number of sizes


@dataclass(frozen=True)
class StepRecord:
    """The record of one call on one rank.

    Attributes:
        number: the number of calls of the pipeline that the rank has begun.
        evaluates: whether the call is an evaluation.
        microbatches: the requested number.
        autocast: a number for the state of autocast; 0 if it is off.
        loss: whether the loss is computed; None on a rank without the last stage.
        trained: a fingerprint of which parameters are trained; 0 if no other rank has them.
        trains: whether any parameter is trained.
        weight: the number of items that count in the batch; None if it is not needed, or not known yet.
        sizes: the sizes that the inputs of this rank show, as `RecordLayout.encode_sizes` returns them.
        checksum_call: the number of the call that the checksums belong to; 0 without checksums.
        checksums: the checksums of the inputs and of the target.
    """

    number: int
    evaluates: bool
    microbatches: int
    autocast: int = 0
    loss: bool | None = None
    trained: int = 0
    trains: bool = True
    weight: float | None = None
    sizes: tuple[int, ...] = (0,)
    checksum_call: int = 0
    checksums: tuple[int, ...] = ()

    @property
    def has_lists(self) -> bool:
        return self.sizes[0] > 0

    @property
    def kind(self) -> str:
        return "an evaluation" if self.evaluates else "a step"


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of a record are in its vector.

    Attributes:
        sizes: the names of all sizes.
        inputs: the names of the inputs that have checksums; the target follows them.
    """

    sizes: tuple[str, ...]
    inputs: tuple[str, ...]

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> RecordLayout:
        values = manifest.values.values()
        inputs = tuple(value.name for value in values if value.producer == CALLER and not value.is_constant)
        return cls(tuple(manifest.sizes), inputs)

    @property
    def length(self) -> int:
        return _FIELDS + ROOM + len(self.inputs) + 1

    def encode(self, record: StepRecord) -> list[int]:
        """The vector of a record, without sizes that do not fit into it."""
        count = len(record.sizes)
        return [
            record.number,
            record.evaluates,
            record.microbatches,
            record.autocast,
            _UNKNOWN if record.loss is None else record.loss,
            record.trained,
            record.trains,
            _UNKNOWN if record.weight is None else _bits(record.weight),
            count,
            record.checksum_call,
            *(record.sizes if count <= ROOM else ()),
            *(0,) * (ROOM - count if count <= ROOM else ROOM),
            *record.checksums,
        ]

    def following(self, vectors: Sequence[Sequence[int]]) -> int:
        """How many numbers follow the vectors of all ranks, the most of any rank; 0 if all sizes fit into them."""
        most = max(vector[_COUNT] for vector in vectors)
        return most if most > ROOM else 0

    def decode(self, vector: Sequence[int], following: Sequence[int] = ()) -> StepRecord:
        """The record of a vector, and of the sizes that followed it."""
        number, evaluates, microbatches, autocast, loss, trained, trains, weight, count, call = vector[:_FIELDS]
        return StepRecord(
            number,
            bool(evaluates),
            microbatches,
            autocast,
            None if loss == _UNKNOWN else bool(loss),
            trained,
            bool(trains),
            None if weight == _UNKNOWN else _number(weight),
            tuple(following[:count] if following else vector[_FIELDS : _FIELDS + count]),
            call,
            tuple(vector[_FIELDS + ROOM :]),
        )

    def encode_sizes(self, sizes: ShownSizes) -> tuple[int, ...]:
        """Sizes as numbers: of microbatches in lists, of whole tensors, of each microbatch in lists; −1 if unknown."""
        tables = sizes.batch_sizes, *sizes.lists
        return len(sizes.lists), *(table.get(name, _UNKNOWN) for table in tables for name in self.sizes)

    def decode_sizes(self, numbers: Sequence[int]) -> ShownSizes:
        """The sizes of the numbers that `encode_sizes` returned."""
        width = len(self.sizes)
        parts = [numbers[1 + place * width : 1 + (place + 1) * width] for place in range(numbers[0] + 1)]
        first, *lists = (
            {name: number for name, number in zip(self.sizes, part, strict=True) if number >= 0} for part in parts
        )
        return ShownSizes(first, tuple(lists))


def _bits(number: float) -> int:
    """The bits of a float that is 0 or more, as an integer that is 0 or more."""
    return int.from_bytes(struct.pack(">d", number + 0.0), "big")


def _number(bits: int) -> float:
    number: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    return number


# ---- step checks -----------------------------------------------------------------------------------------------------
# What the records of all ranks must have in common. Pure functions: each rank calls them with the same records, and so
# raises the same error.


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
            f"ranks are in different calls: {calls}.",
            "the same calls of the pipeline on all ranks, in the same order; look for one that only some make.",
        )
    if any(record.autocast != first.autocast for record in records):
        regions = _by_rank(grid, everyone, lambda rank: _autocast(records[rank].autocast))
        raise RuntimeFault(
            f"ranks make this call in different regions of torch.autocast: {regions}.",
            "the same region, with the same dtype, on all ranks; or no region on any.",
        )
    for line in grid.lines(*SAME_STAGES):
        if len({records[rank].loss for rank in line}) > 1:
            losses = _by_rank(grid, line, lambda rank: "a loss" if records[rank].loss else "no loss")
            raise RuntimeFault(
                f"ranks are in different calls: one for {losses}.",
                "the target on all ranks that have the last stage, or on none of them.",
            )


def check_training(records: Sequence[StepRecord]) -> None:
    """Raise PipegraphError if no parameter of any rank is trained in a step of training."""
    if not any(record.trains for record in records):
        raise PipegraphError(
            "no parameter of any stage requires a gradient, so that a step would train nothing.",
            "requires_grad_() on the parameters to train, or pipe.evaluate(…, target=…) for the loss alone.",
        )


def trained_ranks_that_differ(records: Sequence[StepRecord], grid: RankGrid) -> tuple[int, ...]:
    """Return the first line of ranks with the same stages that train different parameters; empty if no line does."""
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
        f"{first} requires a gradient on {does}, and not on {does_not}{further}. These ranks hold the same stages.",
        "the same requires_grad_() on all of them, between the same steps.",
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
                f"{counts}.",
                "the same number on all of them; they may differ in their rows.",
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
            f"ranks of one pipeline were asked for different numbers of microbatches: {counts}.",
            "the same number on all of them: microbatches=, or lists of equal lengths.",
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


# ---- step agreement --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalStep:
    """What this rank knows of a step.

    Attributes:
        evaluates: whether it is an evaluation.
        trains: whether it trains parameters.
        microbatches: the requested number.
        loss: whether the loss is computed; None on a rank without the last stage.
        needs_weight: whether the loss is divided by the number of items that count.
        weight: that number; None if the batch is not cut yet.
        tables: the sizes of each microbatch, as far as this rank knows them.
    """

    batch: StepBatch
    sizes: ShownSizes
    tables: Sequence[Mapping[str, int]]
    evaluates: bool
    trains: bool
    microbatches: int
    loss: bool | None
    needs_weight: bool = False
    weight: float | None = None


@dataclass(frozen=True)
class AgreedStep:
    """What all ranks know of a step.

    Attributes:
        tables: the sizes of each microbatch of this rank's pipeline.
        rows: of the batches of all data-parallel ranks; their microbatches, if the model fixes the rows.
        weight: the number of items that count there; None if it is not needed, or a rank does not know it yet.
        has_loss: whether the last stage computes a loss.
    """

    tables: Sequence[Mapping[str, int]]
    rows: float
    weight: float | None
    has_loss: bool


@dataclass(frozen=True)
class PendingAgreement:
    """An agreement on a step that is being gathered.

    Attributes:
        record: of this rank.
        vectors: of all ranks; None in a plain process.
    """

    step: LocalStep
    record: StepRecord
    vectors: PendingGather | None

    def drop(self) -> None:
        """Drop what is not gathered, because it keeps connections open."""
        if self.vectors is not None:
            self.vectors.drop()


class StepAgreement:
    """Gathers and checks the records of a pipeline. Making it is collective, and so are its methods.

    Args:
        min_rows: the minimum number of rows of a microbatch.
        checks_inputs: whether checksums of the inputs are compared.
    """

    def __init__(self, context: RankContext, min_rows: int, checks_inputs: bool) -> None:
        self._context, self._min_rows = context, min_rows
        self._layout = RecordLayout.from_manifest(context.manifest)
        self._calls = 0
        self._checksums: Checksums | None = None
        self._group: Group | None = None
        if (world := context.world) is not None:
            self._group = world.along(*DIMENSIONS, on_cpu=True)
            if checks_inputs and len(world.grid.line(world.rank, *SAME_BATCH)) > 1:
                self._checksums = Checksums(len(self._layout.inputs) + 1, context.device)

    def start(self, step: LocalStep) -> PendingAgreement:
        """Start to gather the records of a step of all ranks."""
        self._calls += 1
        record = self._record(step)
        if self._group is None:
            return PendingAgreement(step, record, None)
        vector = torch.tensor(self._layout.encode(record), dtype=torch.int64)
        return PendingAgreement(step, record, self._group.start_all_gather(vector))

    def finish(self, pending: PendingAgreement) -> AgreedStep:
        """Wait for the records of all ranks, and check them.

        Raises:
            RuntimeFault: ranks are in different calls, or of one pipeline and were given different batches, or train
                different parameters of the same stages.
            BatchError: data-parallel ranks have different numbers of microbatches.
            PipegraphError: no rank trains anything.
        """
        step, world = pending.step, self._context.world
        if world is None:
            if step.trains:
                check_training([pending.record])
            self._check_known(step.tables)
            return AgreedStep(step.tables, _rows(step.tables), step.weight, bool(step.loss))
        records = self._records(pending)
        check_calls(records, world.grid)
        by_pipeline = agreed_tables(records, world.grid, self._layout, self._min_rows)
        if step.trains:
            check_training(records)
            differing = trained_ranks_that_differ(records, world.grid)
            if differing:
                raise trained_error(differing, world.gather_text(self._trained_names(), *DIMENSIONS), world.grid)
        check_inputs(records, world.grid, (*self._layout.inputs, "target"))
        tables = by_pipeline[world.grid.line(world.rank, *SAME_BATCH)]
        self._check_known(tables)
        rows = math.fsum(map(_rows, by_pipeline.values()))
        with_loss = [records[rank] for rank in world.grid.line(self._context.placement[self._context.last], *DATA)]
        return AgreedStep(tables, rows, _total_weight(with_loss), bool(with_loss[0].loss))

    def total_weight(self, weight: float) -> float:
        """The sum of a weight over all data-parallel ranks, if `finish` did not know it. Collective for them."""
        world = self._context.world
        return weight if world is None else math.fsum(row[0] for row in world.gather([weight], *DATA))

    def _record(self, step: LocalStep) -> StepRecord:
        call, sums = 0, (ABSENT,) * (len(self._layout.inputs) + 1)
        if self._checksums is not None:
            call, sums = self._checksums.report(self._calls, self._sums(step.batch))
        world = self._context.world
        return StepRecord(
            self._calls,
            step.evaluates,
            step.microbatches,
            autocast_number(self._context.device.type),
            step.loss,
            self._trained() if step.trains and world is not None and world.copies > 1 else 0,
            not step.trains or self._trains_any() or step.batch.requires_grad,
            step.weight,
            self._layout.encode_sizes(step.sizes),
            call,
            sums,
        )

    def _records(self, pending: PendingAgreement) -> list[StepRecord]:
        """The records of all ranks: one message of each, and another one if the sizes of lists do not fit into it."""
        record, group = pending.record, self._group
        assert group is not None and pending.vectors is not None
        vectors = pending.vectors.wait().tolist()
        length = self._layout.following(vectors)
        if not length:
            return [self._layout.decode(vector) for vector in vectors]
        sizes = torch.tensor([*record.sizes, *[0] * (length - len(record.sizes))], dtype=torch.int64)
        table = group.all_gather(sizes).tolist()
        return [self._layout.decode(vector, row) for vector, row in zip(vectors, table, strict=True)]

    def _sums(self, batch: StepBatch) -> list[torch.Tensor | None]:
        values = self._context.manifest.values
        sums = [
            checksum(batch.inputs[name], values[name].batch_dim) if name in batch.inputs else None
            for name in self._layout.inputs
        ]
        return [*sums, checksum(batch.target, 0)]

    def _trains_any(self) -> bool:
        return any(self._context.trained_flags) or bool(self._context.trained_by_loss)

    def _trained(self) -> int:
        """A fingerprint of which parameters are trained."""
        return fingerprint(bytes(self._context.trained_flags))

    def _trained_names(self) -> str:
        return "\n".join(
            f"{name} of stage {index}"
            for index, stage in self._context.stages.items()
            for name, parameter in parameters_of(stage)
            if parameter.requires_grad
        )

    def _check_known(self, tables: Sequence[Mapping[str, int]]) -> None:
        names = self._layout.sizes
        if any(len(table) < len(names) for table in tables):
            unknown = [name for name in names if any(name not in table for table in tables)]
            raise RuntimeFault(
                f"no rank was given an input that shows {', '.join(unknown)}.",
                "pass every input of the model to every rank.",
            )


def _rows(tables: Sequence[Mapping[str, int]]) -> float:
    return sum(table.get(BATCH, 1) for table in tables)


def _total_weight(records: Sequence[StepRecord]) -> float | None:
    weights = [record.weight for record in records if record.weight is not None]
    return math.fsum(weights) if len(weights) == len(records) else None
