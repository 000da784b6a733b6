"""Saves and loads checkpoints of a pipeline, one at a time, also in a thread while steps run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipegraph.errors import CheckpointError
from pipegraph.runtime.checkpoint import loading, storage
from pipegraph.runtime.checkpoint.loading import Checkpoint
from pipegraph.runtime.checkpoint.ranks import CheckpointRanks
from pipegraph.runtime.checkpoint.saving import Collected, SaveRequest, collect, write
from pipegraph.runtime.processes.group import ConnectionLost
from pipegraph.runtime.processes.world import LoneProcess
from pipegraph.runtime.rank_context import RankContext


class Checkpointer:
    """What `Pipeline` saves and loads with. Every method but `close` is collective."""

    def __init__(self, context: RankContext) -> None:
        self._manifest, self._stages, self._device = context.manifest, context.stages, context.device
        self._guard = context.guard
        self._ranks = CheckpointRanks(context.world or LoneProcess(), context.guard)
        self._saving: Future[Path] | None = None
        context.guard.closing.callback(self.close)

    def prepare(self) -> None:
        self._ranks.connect()

    def save(self, request: SaveRequest) -> Path:
        self.wait()
        collected = collect(request, self._manifest, self._stages, self._device, self._ranks)
        if not request.background:
            return write(request, collected, self._ranks)
        copied = self._ranks.agree(lambda: replace(collected, tensors=storage.on_host(collected.tensors)))
        thread_ranks = self._ranks.in_thread()
        thread = ThreadPoolExecutor(1, thread_name_prefix="pipegraph-checkpoint")  # Python waits for it at exit
        self._saving = thread.submit(_write_beside, request, copied, thread_ranks)
        thread.shutdown(wait=False)
        return request.place

    def load(
        self, folder: Path, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None
    ) -> tuple[Checkpoint, int]:
        """Load the newest whole checkpoint. Returns it, and how many steps the pipeline had done."""
        self.wait()
        place, index = loading.find_newest(folder, self._ranks)
        stages, device, ranks = self._stages, self._device, self._ranks
        checkpoint = loading.load(place, index, optimizer, extra, self._manifest, stages, device, ranks)
        return checkpoint, index.step if index.pipeline_steps is None else index.pipeline_steps

    def wait(self) -> Path | None:
        saving, self._saving = self._saving, None
        try:
            return None if saving is None else saving.result()
        except CheckpointError as error:
            if isinstance(error.__cause__, ConnectionLost) and not self._guard.has_failed:
                with self._guard:  # which finds out what rank is gone, and tells all others
                    raise error.__cause__ from None
            raise

    def close(self) -> None:
        """Wait for a checkpoint that is being written, unless the pipeline has failed, which ends that as well."""
        if self._saving is not None and not self._guard.has_failed:
            self._saving.exception()


def _write_beside(request: SaveRequest, collected: Collected, ranks: CheckpointRanks) -> Path:
    try:
        return write(request, collected, ranks)
    except BaseException as error:  # which `wait` raises, but nobody may call that
        if isinstance(error, ConnectionLost):
            error.where = f"saving {request.place}"
            lost, error = error, CheckpointError(f"{request.place} was not saved: a rank is gone ({error}).")
            error.__cause__ = lost  # by which a launcher knows that another rank failed first
        logging.getLogger(__name__).error("%s", error)
        raise error
