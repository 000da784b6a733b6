"""What a run leaves in its folder: checkpoints, from the newest of which it continues, and a log of losses."""

from __future__ import annotations

import json
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from pipegraph.errors import CheckpointError, PipegraphError
from pipegraph.runtime.checkpoint.folder import candidates
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.units import format_count, format_duration

LOG: Final = "log.jsonl"

# ---- checkpoints -----------------------------------------------------------------------------------------------------
# A run saves while it trains, and saves and leaves at SIGTERM.


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


# ---- log -------------------------------------------------------------------------------------------------------------
# ``log.jsonl`` has the loss of every step and every evaluation, one per line:
#
# {"step": 0, "loss": 5.577, "seconds": 0.31}
# {"step": 99, "evaluation": 2.861}


@dataclass(frozen=True)
class TrainingStep:
    """A step that is done.

    Attributes:
        loss: its loss, of all data-parallel ranks.
        seconds: until the last rank was done, without the optimizer.
        metrics: what the model file's `metrics` returned, averaged.
        tokens_per_second: of the steps after this process's first one, with data, optimizer and checkpoints.
        seconds_left: until all steps are done, if their number is known.
        flops_per_second: of the model, as `model_flops` counts them, on all ranks in ``seconds``.
    """

    index: int
    loss: float
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    flops_per_second: float | None = None

    def __str__(self) -> str:
        parts = [
            f"step {self.index}",
            f"loss {self.loss:.6f}",
            *(f"{name} {metric:.6g}" for name, metric in self.metrics.items()),
            f"{self.seconds:.3f} s",
        ]
        if self.tokens_per_second is not None:
            parts.append(f"{format_count(self.tokens_per_second)} tokens/s")
        if self.seconds_left:
            parts.append(f"{format_duration(self.seconds_left)} left")
        return "   ".join(parts)


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over the batches of `evaluation_data` after the step ``index``."""

    index: int
    loss: float

    def __str__(self) -> str:
        return f"step {self.index}   evaluation {self.loss:.6f}"


class TrainingLog:
    """The log of a run that continues after ``done`` steps: what later ones have written before is dropped.

    Raises:
        PipegraphError: it cannot be written.
    """

    def __init__(self, folder: Path, done: int) -> None:
        self._path = folder / LOG
        part = folder / f".{LOG}.part"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(entry) for entry in read_log(folder) if entry["step"] < done]
            part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            raise _not_written(self._path, error) from error

    def write(self, entry: TrainingStep | Evaluation) -> None:
        """Add a line."""
        if isinstance(entry, Evaluation):
            line: dict[str, Any] = {"step": entry.index, "evaluation": entry.loss}
        else:
            line = {"step": entry.index, "loss": entry.loss, **entry.metrics, "seconds": round(entry.seconds, 6)}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")
        except OSError as error:
            raise _not_written(self._path, error) from error


def _not_written(file: Path, error: OSError) -> PipegraphError:
    advice = "room on that disk, or --checkpoint with a folder elsewhere"
    return PipegraphError(f"{file} cannot be written: {error.strerror}.", f"{advice}.")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; none if it has no log. The last one may be cut off in a run that was killed.

    Warns of others that are no entries of a log, and leaves them out: a run does not depend on them.
    """
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    *lines, _ = text.split("\n")
    entries = {number: _entry(line) for number, line in enumerate(lines, 1)}
    bad = [number for number, entry in entries.items() if entry is None]
    if bad:
        remainder = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        warnings.warn(f"{folder / LOG}, line {bad[0]}{remainder}: no entry of a log, which is left out.", stacklevel=2)
    return [entry for entry in entries.values() if entry is not None]


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None
