"""``figures.json`` of a recorded run: the losses of its steps and the memory of its ranks, as `pipegraph run` printed
them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from pipegraph.errors import PipegraphError
from pipegraph.package.json_file import Count, Entry, FileKind, Name, json_text
from pipegraph.planner.run_comparison import PredictedAndMeasured
from pipegraph.regular_file import replaced_file

FILE: Final = "figures.json"
TOGETHER: Final = "together"
"""The kind of memory that is the sum of the others or, as measured on a GPU, all that torch had allocated."""

_MOST: Final = 1e300

Number = Annotated[float, Meta(ge=-_MOST, le=_MOST)]


class StepLoss(Entry, frozen=True):
    """The loss of a step of the run; None if it is not a finite number up to 1e300."""

    step: Count
    loss: Number | None


class MemoryPair(Entry, frozen=True):
    """Bytes, predicted and measured; None if they are not known."""

    predicted: Number | None
    measured: Number | None


class RunFigures(Entry, frozen=True):
    """What a run printed.

    Attributes:
        losses: of the steps, in order.
        tokens_per_second: of all ranks, with data, optimizer and checkpoints; None if tokens are not counted.
        memory: of each rank, by kind, with `TOGETHER`.
        flops_per_second: of the model, on all ranks: the median of the steps after the first one.
        peak_flops: of the devices of all processes; None if it is not known.
    """

    losses: tuple[StepLoss, ...]
    memory: tuple[dict[Name, MemoryPair], ...]
    tokens_per_second: Number | None = None
    flops_per_second: Number | None = None
    peak_flops: Number | None = None
    schema_version: int = 1

    @classmethod
    def of_run(
        cls,
        steps: Iterable[Mapping[str, Any]],
        memory: Sequence[Mapping[str, PredictedAndMeasured]],
        allocated: Sequence[PredictedAndMeasured],
        peak_flops: float | None = None,
    ) -> RunFigures:
        """Return the figures of a run.

        Args:
            steps: what it printed of its steps, and of evaluations, which are left out.
            memory, allocated: as `RunComparison` has them.
            peak_flops: of the devices of all processes.
        """
        records = [step for step in steps if "tokens_per_second" in step]
        rates = [step["tokens_per_second"] for step in records if step["tokens_per_second"]]
        flops = [step["flops_per_second"] for step in records[1:] or records if step.get("flops_per_second")]
        return cls(
            tuple(StepLoss(step["index"], step["loss"] if abs(step["loss"]) <= _MOST else None) for step in records),
            tuple(
                {kind: MemoryPair(pair.predicted, pair.measured) for kind, pair in {**rank, TOGETHER: total}.items()}
                for rank, total in zip(memory, allocated, strict=True)
            ),
            rates[-1] if rates else None,
            statistics.median(flops) if flops else None,
            peak_flops,
        )

    @classmethod
    def read(cls, folder: Path) -> RunFigures | None:
        """Read the figures in the folder of a run; None without the file. Raises PipegraphError for a damaged one."""
        return _KIND.read(folder / FILE) if (folder / FILE).exists() else None

    @property
    def memory_pairs(self) -> list[dict[str, PredictedAndMeasured]]:
        """The memory of each rank, as tables take it."""
        return [
            {kind: PredictedAndMeasured(pair.predicted, pair.measured) for kind, pair in rank.items()}
            for rank in self.memory
        ]

    def write(self, folder: Path) -> None:
        """Write them into the folder of a run."""
        with replaced_file(folder / FILE) as part:
            part.write_text(f"{json_text(msgspec.to_builtins(self))}\n", encoding="utf-8")


_KIND: Final = FileKind(RunFigures, "figures of a run", PipegraphError, "Try: leave the file out.", 1)
