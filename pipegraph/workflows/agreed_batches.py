"""The batches that all ranks train on together: a step begins if each rank has one that the pipeline takes.

rank 0   batch 7 ──────────┐
rank 1   batch 7, refused ─┴─ known to all ─▶ every rank raises before anything of the step is sent, and can still save
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from pipegraph.cost.model_output import output_tensors
from pipegraph.errors import PipegraphError, SourceError
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.group import ConnectionLost
from pipegraph.workflows.batch import Batch
from pipegraph.workflows.training_data import TrainingData, fingerprint


class AgreedBatches:
    """The batches of one rank, as far as all ranks have one.

    Args:
        data: of this rank.
        place: this data-parallel rank.
        places: how many there are.
    """

    def __init__(self, pipe: Pipeline, data: TrainingData, place: int, places: int) -> None:
        self._pipe, self._data, self._place, self._places = pipe, data, place, places
        self._begun = False
        self._accepted_kinds: set[Any] = set()  # shapes and dtypes of batches that fit

    def take(self, explained: AbstractContextManager[None]) -> Batch | None:
        """The next batch; None on all ranks if one of them has none left. Collective.

        Args:
            explained: a context in which batches are checked.

        Raises:
            PipegraphError: data cannot be read, or do not fit; or, on all other ranks, those of one do not.
        """
        batch, problem, mark = None, None, 0
        try:
            batch = self._data.take()
            if batch is not None:
                mark = 0 if self._begun else fingerprint(batch)
                with explained:
                    self._check(batch)
        except PipegraphError as error:
            problem = error
        rows = self._pipe.gather([batch is not None, self._place, mark, problem is not None], everywhere=True)
        if problem is not None:
            raise problem
        failed = next((rank for rank, row in enumerate(rows) if row[3]), None)
        if failed is not None:
            message = f"rank {failed} has no batch to train on.\nTry: what the message of rank {failed} says."
            # By this cause a launcher knows that another rank failed first.
            raise SourceError(message) from ConnectionLost(failed, "its data failed")
        if not all(row[0] for row in rows):
            return None
        if len({(place, mark) for _, place, mark, _ in rows}) > self._places:
            raise SourceError(
                f"{self._data.last} is not the same on all ranks of a pipeline, which each read it: what is random in "
                "it has to be seeded.\nTry: generator=torch.Generator().manual_seed(rank)"
            )
        self._begun = True
        return batch

    def _check(self, batch: Batch) -> None:
        """Raise BatchError for a batch of a new kind that a step would refuse."""
        tensors: dict[str, Tensor] = output_tensors(batch)
        kind = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        if kind not in self._accepted_kinds:
            self._pipe.check_batch(*batch.args, target=batch.target, **batch.kwargs)
            self._accepted_kinds.add(kind)
