"""How the executor of the last stage gets the loss of a step: of each microbatch, checked at first, or of the batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from pipegraph.errors import PipegraphError
from pipegraph.package import Manifest
from pipegraph.runtime.batch_loss import BatchLoss, require_forwards_first
from pipegraph.runtime.executor import Executor
from pipegraph.runtime.loss_check import LossCheck
from pipegraph.runtime.loss_reduction import LossFunction, LossReduction
from pipegraph.runtime.microbatches import join_outputs, target_dims, values_with_rows
from pipegraph.runtime.processes.rank_grid import DATA
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.stage_kernels import packed_loss
from pipegraph.runtime.step_inputs import StepInputs
from pipegraph.runtime.targets import join_target
from pipegraph.schedule import Schedule


class StepLosses:
    """The losses of steps on one process.

    Args:
        manifest: of the package.
        stages: of this process.
        loss_fn: of the pipeline.
        reduction: how its values are put together.
        world: the processes of the pipeline.
        has_replicas: whether a stage is in `DistributedDataParallel`.

    Raises:
        PipegraphError: a loss over the whole batch is divided between data-parallel ranks.
    """

    def __init__(
        self,
        manifest: Manifest,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFunction | None,
        reduction: LossReduction,
        world: World | None,
        has_replicas: bool,
    ) -> None:
        self._over_batch = loss_fn is not None and reduction.over == "batch"
        self._is_shared = has_replicas or (world is not None and world.grid.length(*DATA) > 1)
        self._is_checked = False
        if self._over_batch and self._is_shared:
            raise PipegraphError(
                'loss_over="batch" evaluates the loss on the rank of the last stage, and the outputs of the batch are '
                "divided between data-parallel ranks.\n"
                "Try: a mesh of pp alone; or a loss_fn that gathers the outputs of all ranks itself, with "
                'loss_over="microbatch" and one microbatch.'
            )
        self._manifest, self._last = manifest, len(manifest.stages) - 1
        self._with_rows = values_with_rows(manifest)
        stage = stages.get(self._last)
        self._values = [manifest.values[name] for name in manifest.stages[-1].outputs]
        self._loss = packed_loss(manifest, stage, loss_fn) if stage is not None and loss_fn is not None else None
        self._check: LossCheck | None = None
        if self._loss is not None and stage is not None and reduction.over == "rows":
            self._check = LossCheck(manifest, stage, self._loss, reduction, target_dims(manifest))

    def check_schedule(self, schedule: Schedule) -> None:
        """Raise ScheduleError if the loss is over the whole batch and backwards begin before it is known."""
        if self._over_batch:
            require_forwards_first(schedule)

    def prepare(self, executor: Executor, batch: StepInputs, trains: bool) -> None:
        """Tell an executor how the loss of a step is computed. Raises ScheduleError as `check_schedule` does."""
        executor.batch_loss = executor.loss_check = None
        if self._over_batch and batch.with_loss:
            require_forwards_first(executor.schedule)
        if not executor.has_stage(self._last) or self._loss is None or not batch.with_loss:
            return
        if self._over_batch:
            sizes, dims = batch.batch.sizes, target_dims(self._manifest)
            executor.batch_loss = BatchLoss(
                self._loss,
                self._values,
                batch.batch.targets,
                lambda parts, dim: join_outputs(parts, dim, sizes.weights),
                lambda targets: join_target(targets, {sum(sizes.lengths(value)) for value in self._with_rows}, dims),
                trains,
            )
        elif trains and self._check is not None and not self._check.is_done:
            # One microbatch of one rank is the whole batch, whatever its loss is.
            self._is_checked = self._is_shared or len(batch.batch.sizes.microbatches) > 1
            executor.loss_check = self._check if self._is_checked else None

    def after_step(self) -> None:
        """End the check of the first step. Raises BatchError if the loss is not what the pipeline takes it for."""
        if self._check is not None and self._is_checked and not self._check.is_done:
            self._check.finish()


def check_grad_mode(trains: bool) -> None:
    """Raise PipegraphError if a step would train nothing."""
    if trains and torch.is_inference_mode_enabled():
        raise PipegraphError(
            "step() under torch.inference_mode() would train nothing: no gradient is kept there.\n"
            "Try: step() outside it, or evaluate()."
        )


def check_without_loss(schedule: str, trains: bool, has_target: bool) -> None:
    """Raise PipegraphError if a step needs a loss, or is given a target, and the pipeline has no `loss_fn`."""
    if trains:
        raise PipegraphError(f"{schedule} has a backward, which needs a loss.\nTry: Pipeline(…, loss_fn=…).")
    if has_target:
        raise PipegraphError(
            "a target was given, and this Pipeline has no loss_fn that takes it.\n"
            "Try: Pipeline(…, loss_fn=…), or leave the target out."
        )
