"""The shares of a batch that data-parallel ranks take: how much each weighs, and the loss of all of them.

rank (dp 0)   6 rows ─▶ 2 microbatches of 3      loss · 6/10 ─┐
rank (dp 1)   4 rows ─▶ 2 microbatches of 2      loss · 4/10 ─┴─ sum: the loss of the whole batch

So a gradient is a part of that of the whole batch as soon as it is computed, and ranks only have to add theirs up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipegraph.errors import BatchError, RuntimeFault
from pipegraph.runtime.processes.rank_grid import DATA
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.step_data import StepInputs


class BatchShares:
    """What the data-parallel ranks of one stage exchange in a step. Making it is collective for them."""

    def __init__(self, world: World) -> None:
        self._ranks = world.grid.line(world.rank, *DATA)
        self._own, self._named = self._ranks.index(world.rank), world.grid.text
        self._cpu, self._device = world.along(*DATA, on_cpu=True), world.along(*DATA)

    def agree(self, given: StepInputs, evaluates: bool, computes_loss: bool) -> float:
        """Tell the others what is known of this rank's share, and cut it into as many microbatches as they have.

        That is the least number of all, because each rank sends and reduces in the order of one schedule.

        Returns:
            What all shares weigh together.

        Raises:
            BatchError: shares that the callers have cut have different numbers of microbatches.
            RuntimeFault: the ranks are in different calls.
        """
        count = len(given.batch.sizes.microbatches)
        table = torch.zeros(len(self._ranks), 5, dtype=torch.float64)
        own = evaluates, count, given.own_weight, given.is_cut_by_caller, computes_loss
        table[self._own] = torch.tensor(own, dtype=torch.float64)
        self._cpu.all_reduce(table)
        self._check(table)
        given.cut_into(int(table[:, 1].min()))
        return float(table[:, 2].sum())

    def total(self, numbers: Sequence[Tensor]) -> list[Tensor]:
        """The sum of each number over all shares."""
        together = torch.stack(list(numbers))
        self._device.all_reduce(together)
        return list(together)

    def _check(self, table: Tensor) -> None:
        for column, what in ((0, ("a step", "an evaluation")), (4, ("no loss", "a loss"))):
            other = next((i for i, value in enumerate(table[:, column]) if value != table[self._own, column]), None)
            if other is not None:
                theirs, ours = (what[int(table[rank, column])] for rank in (other, self._own))
                raise RuntimeFault(
                    f"{self._named(self._ranks[other])} is in a call for {theirs}, and this rank in one for {ours}. "
                    "All ranks make the same calls of a pipeline, in the same order."
                )
        counts = table[:, 1].int().tolist()
        if any(cut and count != min(counts) for cut, count in zip(table[:, 3], counts, strict=True)):
            named = ", ".join(
                f"{count} on {self._named(rank)}" for rank, count in zip(self._ranks, counts, strict=True)
            )
            raise BatchError(
                f"data-parallel ranks were given lists of different numbers of microbatches, or too few rows for them: "
                f"{named}.\nTry: equally many on each; they may differ in their rows."
            )
