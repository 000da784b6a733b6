"""The folder of a run's checkpoints. Each one in it is there whole or not at all.

folder/step-00000123/checkpoint.json     sizes and digests of all other files
                     .metadata, *.distcp of torch.distributed.checkpoint
folder/.step-00000124.partial/           being written, or left by processes that were killed
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from pipegraph.errors import CheckpointError
from pipegraph.package.json_file import Count, Entry, FileKind, Name, Text, json_text
from pipegraph.package.manifest import ListedFile
from pipegraph.package.staged_folder import replace_folder

INDEX: Final = "checkpoint.json"

_STEP: Final = re.compile(r"step-(\d+)")
_PARTIAL: Final = re.compile(r"\.step-\d+\.partial")


class SavedExtra(Entry, frozen=True):
    """Extra state that the user saved with the model.

    Attributes:
        is_stateful: whether it is the ``state_dict()`` of an object; otherwise it is a plain value.
        versions: for each rank, the index of its value among the different values of all ranks.
    """

    is_stateful: bool
    versions: tuple[Count, ...]


class CheckpointIndex(Entry, frozen=True, kw_only=True):
    """What ``checkpoint.json`` says.

    Attributes:
        mesh: the dimensions of the ranks that saved, and how many there were along each.
        pipeline_steps: the steps of the pipeline, from which seeded random numbers continue: with accumulation
            more than `step`. None in a checkpoint of an older version.
        without_frozen: whether parameters that needed no gradient were left out.
    """

    schema_version: int = 1
    generator: Text
    step: Count
    mesh: tuple[tuple[Name, Count], ...]
    optimizer: Text | None
    extra: dict[Name, SavedExtra]
    files: dict[Name, ListedFile]
    pipeline_steps: Count | None = None
    without_frozen: bool = False


_KIND: Final = FileKind(
    CheckpointIndex,
    "an index of a checkpoint",
    CheckpointError,
    "Try: an older checkpoint.",
    version=1,
)


def place_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def candidates(folder: Path) -> list[Path]:
    """What may be a checkpoint: those in a folder, the highest step first, or the folder itself."""
    if _STEP.fullmatch(folder.resolve().name) and (folder / INDEX).exists():
        return [folder]
    numbered_paths = [(int(match[1]), path) for path in _entries(folder) if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(numbered_paths, reverse=True)]


def partial_of(folder: Path, step: int) -> Path:
    """The folder into which the checkpoint of a step is written."""
    return folder / f".step-{step:08d}.partial"


def start(partial: Path) -> None:
    """Make the folder into which a checkpoint is written. What killed processes left of others is removed."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    remove_partial(partial.parent)
    partial.mkdir()


def remove_partial(folder: Path) -> None:
    """Remove what is not a whole checkpoint. One run at a time saves into a folder."""
    for path in _entries(folder):
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def file_names(folder: Path) -> list[str]:
    """The files of a checkpoint but for its index."""
    return sorted(path.name for path in folder.iterdir() if path.name != INDEX)


def finish(partial: Path, place: Path, index: CheckpointIndex) -> None:
    """Write the index, and give the checkpoint its place in one moment, also if there is one already."""
    with (partial / INDEX).open("w") as file:
        file.write(json_text(msgspec.to_builtins(index)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    _flush(partial)
    replace_folder(place, partial)
    shutil.rmtree(partial, ignore_errors=True)  # the one that was there
    _flush(place.parent)


def drop_old(folder: Path, step: int, keep: int) -> None:
    """Leave `keep` checkpoints, that of `step` and the newest before it. Those of later steps stay.

    Nothing of a checkpoint is left under its name if the process is killed meanwhile.
    """
    older = [candidate for candidate in candidates(folder) if _step(candidate) < step]
    for path in older[keep - 1 :]:
        going = path.with_name(f".{path.name}.partial")
        with suppress(OSError):
            path.rename(going)
            shutil.rmtree(going, ignore_errors=True)


def read_index(place: Path) -> CheckpointIndex:
    """Read the index of a checkpoint. Raises CheckpointError."""
    return _KIND.read(place / INDEX)


def check_files(place: Path, files: Mapping[str, ListedFile], names: Sequence[str]) -> None:
    """Raise CheckpointError if one of the files `names` is missing, or not as it was written."""
    for name in names:
        file = place / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing.")
        if problem := files[name].problem(file):
            raise CheckpointError(f"{file} is damaged: {problem}.")


def _step(place: Path) -> int:
    match = _STEP.fullmatch(place.name)
    assert match is not None
    return int(match[1])


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _flush(folder: Path) -> None:
    """Have a folder's entries on the disk, because a rename may otherwise outlive a power failure without them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
