"""Read a checkpoint, the newest whole one, into the stages that this process has now."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.errors import CheckpointError
from pipegraph.package import Manifest
from pipegraph.runtime.checkpoint import extra_state, folder, optimizer_state, random_state
from pipegraph.runtime.checkpoint.extra_state import decoded
from pipegraph.runtime.checkpoint.folder import CheckpointIndex
from pipegraph.runtime.checkpoint.optimizer_state import OptimizerShare, OptimizerState
from pipegraph.runtime.checkpoint.ranks import CheckpointRanks
from pipegraph.runtime.checkpoint.saving import (
    OPTIMIZER,
    check_same_model,
    frozen_names,
    model_tensors,
    parameter_names,
)
from pipegraph.runtime.checkpoint.storage import StoredTensors
from pipegraph.runtime.processes.rank_grid import RankGrid


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
        folder: its path.
        step: the number of steps that were done when it was saved.
        extra: the saved plain values, and the `state_dict()` of each saved object that `load` was not given.
        has_random_state: whether the random number generators resume the saved states, as the ranks are the same.
    """

    folder: Path
    step: int
    extra: dict[str, Any]
    has_random_state: bool


def find_newest(directory: Path, ranks: CheckpointRanks) -> tuple[Path, CheckpointIndex]:
    """Return the newest whole checkpoint of a folder, or the folder itself if it is a checkpoint. Collective.

    Each rank reads a part of the files. The first rank warns about damaged checkpoints.

    Raises:
        CheckpointError: the folder has no whole checkpoint; on every rank.
    """
    candidate_names = ranks.agree(
        lambda: [str(path.relative_to(directory)) for path in folder.candidates(directory)] if ranks.is_first else []
    )
    names = ranks.gather(candidate_names)[0]
    damaged = []
    for name in names:
        place = directory / name
        try:
            index = ranks.agree(partial(_checked, place, ranks))
        except CheckpointError as error:
            damaged.append(error.problem)
            continue
        for problem in damaged if ranks.is_first else ():
            warnings.warn(f"a checkpoint cannot be used: {problem} {place} is taken in its place.", stacklevel=5)
        return place, index
    if damaged:
        raise CheckpointError(
            "\n  ".join([f"no checkpoint in {directory} is whole:", *damaged]),
            "restore the files, or the folder of another run.",
        )
    reason = "has no checkpoint" if directory.is_dir() else "is no folder"
    raise CheckpointError(
        f"{directory} {reason}.", "the folder that was given to save(), or one of the step-… folders in it."
    )


def _checked(place: Path, ranks: CheckpointRanks) -> CheckpointIndex:
    index = folder.read_index(place)
    folder.check_files(place, index.files, sorted(index.files)[ranks.rank :: ranks.size])
    return index


def load(
    place: Path,
    index: CheckpointIndex,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None,
    manifest: Manifest,
    stages: Mapping[int, nn.Module],
    device: torch.device,
    ranks: CheckpointRanks,
) -> Checkpoint:
    """Read a checkpoint into the stages, the optimizer and the objects in `extra`. Collective.

    Raises:
        CheckpointError: it does not fit; on every rank, and nothing was changed.
    """
    tensors, frozen = model_tensors(manifest, stages), frozen_names(manifest, stages) if index.without_frozen else set()
    everywhere = {
        name: is_frozen
        for frozen_flags in ranks.gather({tensor_name: tensor_name in frozen for tensor_name in tensors})
        for name, is_frozen in frozen_flags.items()
    }
    saved_grid = RankGrid(tuple(name for name, _ in index.mesh), tuple(length for _, length in index.mesh))

    storage = ranks.agree(lambda: StoredTensors(place, index.files))
    stored = storage.entries

    def plan() -> tuple[dict[str, Any], dict[str, str], dict[str, Tensor], OptimizerState | None]:
        model = {name: tensor for name, tensor in tensors.items() if name in stored or name not in frozen}
        check_same_model(
            model, [name for name, is_frozen in everywhere.items() if name in stored or not is_frozen], stored
        )
        if extra is not None:
            extra_state.check_names(extra, index.extra)
        extra_names = _extra_names(index, saved_grid, ranks, extra or {})
        required_names = [*extra_names.values()]
        state = None
        if optimizer is not None:
            if index.optimizer is None:
                raise CheckpointError(f"{place} was saved without an optimizer.", "load() without one.")
            state = OptimizerState(optimizer, parameter_names(manifest, stages))
            required_names.append(OPTIMIZER)
        if saved_grid == ranks.grid:
            required_names += [name for name in random_state.stored_names(ranks.rank) if name in stored]
        values = {name: torch.empty(stored[name].size, dtype=torch.uint8) for name in required_names}
        return model, extra_names, values, state

    model, extra_names, values, state = ranks.agree(plan)
    ranks.agree(lambda: storage.read(values))
    shares = ranks.gather(None if state is None else state.share())

    def prepare() -> tuple[Any, OptimizerShare | None, dict[str, Any]]:
        read = {name: decoded(values[full]) for name, full in extra_names.items()}
        if state is None:
            return None, None, read
        saved = OptimizerShare.from_data(decoded(values[OPTIMIZER]))
        optimizer_state.check_fits(saved, optimizer_state.merge([share for share in shares if share is not None]))
        return state.prepare(stored, saved.plain), saved, read

    new, saved, read = ranks.agree(prepare)
    ranks.agree(lambda: storage.read({**model, **({} if new is None else new.tensors)}))

    def restore_states() -> None:
        if state is not None and saved is not None:
            state.restore(new, saved.groups)
        for name, value in (extra or {}).items():
            if extra_state.is_stateful(value):
                value.load_state_dict(read.pop(name))
        random_state.set_random_states(values, ranks.rank, device)

    ranks.agree(restore_states)
    return Checkpoint(place, index.step, read, saved_grid == ranks.grid)


def _extra_names(
    index: CheckpointIndex, saved_grid: RankGrid, ranks: CheckpointRanks, requested_names: Collection[str]
) -> dict[str, str]:
    """Under which name each value for this rank is stored. One that nobody asked for may be left out."""
    names = {}
    for name, saved in index.extra.items():
        try:
            version = extra_state.version_for(name, saved, saved_grid, ranks.grid, ranks.rank)
        except CheckpointError:
            if name in requested_names:
                raise
            warnings.warn(f'extra["{name}"] is left out: its values are those of other ranks.', stacklevel=6)
            continue
        names[name] = extra_state.stored_name(name, version)
    return names
