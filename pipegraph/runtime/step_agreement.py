"""The agreement of all ranks on a step: one record of each is gathered and checked before anything is computed.

local batch ─▶ StepRecord ─ gathered from all ranks ─▶ checks ─▶ AgreedStep: the sizes of all microbatches, the weight
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pipegraph.errors import RuntimeFault
from pipegraph.kernels.autocast import autocast_number
from pipegraph.package import Manifest
from pipegraph.package.sizes import BATCH
from pipegraph.runtime.batch import StepBatch
from pipegraph.runtime.checksums import ABSENT, Checksums, checksum
from pipegraph.runtime.gradient_reduction import trained_by
from pipegraph.runtime.parameters import Stages, parameters_of
from pipegraph.runtime.processes.group import Group, PendingGather
from pipegraph.runtime.processes.rank_grid import DATA, DIMENSIONS
from pipegraph.runtime.processes.world import World, fingerprint
from pipegraph.runtime.step_checks import (
    SAME_BATCH,
    agreed_tables,
    check_calls,
    check_inputs,
    check_training,
    trained_error,
    trained_ranks_that_differ,
)
from pipegraph.runtime.step_record import RecordLayout, StepRecord
from pipegraph.runtime.step_sizes import ShownSizes


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
    """

    tables: Sequence[Mapping[str, int]]
    rows: float
    weight: float | None


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
        stages: of this process.
        loss_fn: may have parameters of its own.
        world: all processes; None for a plain process.
        min_rows: of a microbatch.
        checks_inputs: whether checksums of the inputs are compared.
    """

    def __init__(
        self,
        manifest: Manifest,
        stages: Stages,
        loss_fn: object,
        world: World | None,
        device: torch.device,
        min_rows: int,
        checks_inputs: bool,
    ) -> None:
        self._manifest, self._stages, self._loss_fn, self._world = manifest, stages, loss_fn, world
        self._device, self._min_rows = device, min_rows
        self._layout = RecordLayout.from_manifest(manifest)
        self._calls = 0
        self._checksums: Checksums | None = None
        self._group: Group | None = None
        if world is not None:
            self._group = world.along(*DIMENSIONS, on_cpu=True)
            if checks_inputs and len(world.grid.line(world.rank, *SAME_BATCH)) > 1:
                self._checksums = Checksums(len(self._layout.inputs) + 1, device)

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
        step, world = pending.step, self._world
        if world is None:
            if step.trains:
                check_training([pending.record])
            self._check_known(step.tables)
            return AgreedStep(step.tables, _rows(step.tables), step.weight)
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
        return AgreedStep(tables, rows, _total_weight([records[rank] for rank in world.grid.line(world.rank, *DATA)]))

    def total_weight(self, weight: float) -> float:
        """The sum of a weight over all data-parallel ranks, if `finish` did not know it. Collective for them."""
        if self._world is None:
            return weight
        return math.fsum(row[0] for row in self._world.gather([weight], *DATA))

    def _record(self, step: LocalStep) -> StepRecord:
        call, sums = 0, (ABSENT,) * (len(self._layout.inputs) + 1)
        if self._checksums is not None:
            call, sums = self._checksums.report(self._calls, self._sums(step.batch))
        world = self._world
        return StepRecord(
            self._calls,
            step.evaluates,
            step.microbatches,
            autocast_number(self._device.type),
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
        values = self._manifest.values
        sums = [
            checksum(batch.inputs[name], values[name].batch_dim) if name in batch.inputs else None
            for name in self._layout.inputs
        ]
        return [*sums, checksum(batch.target, 0)]

    def _trains_any(self) -> bool:
        stages = self._stages.values()
        trains = any(parameter.requires_grad for stage in stages for parameter in stage.parameters())
        return trains or bool(trained_by(self._loss_fn))

    def _trained(self) -> int:
        """A fingerprint of which parameters are trained."""
        stages = self._stages.values()
        return fingerprint(bytes(parameter.requires_grad for stage in stages for parameter in stage.parameters()))

    def _trained_names(self) -> str:
        return "\n".join(
            f"{name} of stage {index}"
            for index, stage in self._stages.items()
            for name, parameter in parameters_of(stage)
            if parameter.requires_grad
        )

    def _check_known(self, tables: Sequence[Mapping[str, int]]) -> None:
        names = self._layout.sizes
        if any(len(table) < len(names) for table in tables):
            unknown = [name for name in names if any(name not in table for table in tables)]
            raise RuntimeFault(
                f"no rank was given an input that shows {', '.join(unknown)}.\n"
                "Try: pass every input of the model to every rank."
            )


def _rows(tables: Sequence[Mapping[str, int]]) -> float:
    return sum(table.get(BATCH, 1) for table in tables)


def _total_weight(records: Sequence[StepRecord]) -> float | None:
    weights = [record.weight for record in records if record.weight is not None]
    return math.fsum(weights) if len(weights) == len(records) else None
