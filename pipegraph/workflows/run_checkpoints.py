"""The checkpoints of a run: it continues from the newest, saves while it trains, and saves and leaves at SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipegraph.errors import CheckpointError
from pipegraph.runtime.checkpoint.folder import candidates
from pipegraph.runtime.pipeline import Pipeline


@dataclass(frozen=True)
class CheckpointOptions:
    """Where a run is saved.

    Attributes:
        folder: of the run; ranks share it.
        every: steps from one checkpoint to the next.
        keep: how many stay.
    """

    folder: Path
    every: int = 100
    keep: int = 3


class RunCheckpoints:
    """The checkpoints of one run. Every method but `is_due` is collective.

    Args:
        extra: objects with a state, which are saved with the optimizer.

    Attributes:
        saved: the step of the newest checkpoint, which may be on its way; 0 without one.
    """

    def __init__(
        self, options: CheckpointOptions, pipe: Pipeline, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]
    ) -> None:
        self._options, self._pipe, self._optimizer, self._extra = options, pipe, optimizer, extra
        self.saved = 0

    def go_on(self) -> Path | None:
        """Read the newest checkpoint that is whole, and return its place; None if the folder has none.

        Raises:
            CheckpointError: none is whole, or it is of another model, optimizer or data. Nothing was changed.
        """
        self._pipe.prepare_save()  # while SIGTERM still ends a rank at once
        folder = self._options.folder
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file.", "--checkpoint with a folder.")
        if candidates(folder) == [folder]:
            raise CheckpointError(
                f"{folder} is one checkpoint, and a run has a folder of them.", f"--checkpoint {folder.parent}."
            )
        # What one rank sees counts for all: another one may see a folder that is shared a moment later.
        if not any(row[0] for row in self._pipe.gather([bool(candidates(folder))], everywhere=True)):
            return None
        try:
            checkpoint = self._pipe.load(folder, self._optimizer, self._extra)
        except CheckpointError as error:
            raise CheckpointError(
                f"the run in {folder} cannot continue: {error.problem}",
                "the package, --model, --precision and mesh that it "
                "was saved with; or --checkpoint with a new folder, which begins again.",
            ) from error
        self.saved = checkpoint.step
        return checkpoint.folder

    def is_due(self, step: int) -> bool:
        """Whether the run is saved after this number of steps."""
        return step % self._options.every == 0

    def save(self, step: int, background: bool) -> None:
        """Save the run after this number of steps, unless it is saved already; with ``background``, while it continues.

        Raises:
            CheckpointError: this checkpoint, or the one before it, could not be saved.
        """
        options = self._options
        if step == self.saved:
            self._pipe.wait_for_save()
            return
        self.saved = step
        self._pipe.save(
            options.folder, self._optimizer, step=step, extra=self._extra, background=background, keep=options.keep
        )


class Termination:
    """Whether SIGTERM came while the run awaited it: a run then ends a step, saves, and leaves.

    Handlers belong to the main thread. Elsewhere the signal ends the process at once, as it does otherwise.
    """

    exit_code = 128 + signal.SIGTERM

    def __init__(self) -> None:
        self.is_requested = False

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Note the signal instead of ending at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(*_: object) -> None:
            self.is_requested = True

        previous_handler = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous_handler)
