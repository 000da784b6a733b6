"""``pipegraph export``: a checkpoint as safetensors files that ``from_pretrained`` or ``load_state_dict`` takes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from pipegraph.arguments import argument, require_path
from pipegraph.errors import CheckpointError, PackageError
from pipegraph.package import CONFIG, WEIGHTS_INDEX, Manifest, Package
from pipegraph.package.folder import write_tensor_index, write_tensors
from pipegraph.package.staged_folder import staged_folder, write_errors
from pipegraph.progress import track
from pipegraph.regular_file import LARGE_LIMIT, read_regular_file
from pipegraph.runtime.checkpoint.loading import find_newest
from pipegraph.runtime.checkpoint.ranks import CheckpointRanks
from pipegraph.runtime.checkpoint.saving import PREFIX, check_same_model, model_tensors
from pipegraph.runtime.checkpoint.storage import StoredTensors
from pipegraph.runtime.package_agreement import check_packages
from pipegraph.runtime.processes.group import TIMEOUT
from pipegraph.runtime.processes.world import LoneProcess, guard_of, join_world
from pipegraph.version import __version__

SHARD_BYTES: Final = 5 * 10**9
_METADATA: Final = {"format": "pt"}  # which transformers asks for
_GENERATOR: Final = "pipegraph export"
_FILE: Final = re.compile(rf"model-\d+-of-\d+\.safetensors|{re.escape(WEIGHTS_INDEX)}|{re.escape(CONFIG)}")


@dataclass(frozen=True)
class ExportResult:
    """What was written.

    Attributes:
        checkpoint: the one that was read.
        files: of weights.
        bytes: of all tensors.
        has_config: whether the package had a Hugging Face configuration, which is there now, too.
        is_huggingface: whether names are those of a Hugging Face checkpoint.
    """

    checkpoint: Path
    files: tuple[str, ...]
    bytes: int
    has_config: bool
    is_huggingface: bool


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor of a checkpoint, and what is written of it.

    Attributes:
        source: its name there.
        names: those that it gets: several for a tied weight, which `load_state_dict` takes under each of them.
        parts: the names of the parts into which Hugging Face cuts it; empty if it stays whole.
    """

    source: str
    size: torch.Size
    dtype: torch.dtype
    names: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize * max(len(self.names), 1)

    def written(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What is written, by names: the opposite of what a package's ``weights.py`` does when it reads."""
        for name in self.names:
            yield name, tensor if name == self.names[0] else tensor.clone()
        is_counted = any("*" in part for part in self.parts)
        for number, row in enumerate(tensor if is_counted else tensor[None]) if self.parts else ():
            for name, part in zip(self.parts, row.chunk(len(self.parts)), strict=True):
                yield name.replace("*", str(number)) if is_counted else name, part


def export(
    checkpoint: str | PathLike[str],
    package: Package,
    out: str | PathLike[str],
    shard_bytes: int = SHARD_BYTES,
    timeout: float = TIMEOUT,
    overwrite: bool = False,
) -> ExportResult:
    """Write the model of a checkpoint as safetensors files with their index.

    Names are those of the model's ``state_dict()``; for a Hugging Face model those that ``save_pretrained`` writes,
    with each tied weight once. ``config.json`` is also written if the package has it. Values and dtypes are those of
    the checkpoint.

    Collective: under torchrun each rank writes separate files, into a folder that all share. A rank holds the tensors
    of one file at a time. The folder is written completely or not at all.

    Args:
        checkpoint: the folder of a run, of which the newest whole checkpoint is taken, or one of those in it.
        package: of the model; it may be split in another way than the one that was trained.
        out: a folder that is new or empty.
        shard_bytes: how large a file may be, unless it is a single tensor.
        timeout: seconds that a rank waits for another one.
        overwrite: whether to replace what an earlier export wrote there.

    Raises:
        CheckpointError: there is no whole checkpoint, or it is of another model, or of a part of one; or nothing can be
            written there, such as on a full disk. On every rank.
        PackageError: the folder holds files that may not be replaced, or transformers stores a tensor in a form that
            only it can write.
    """
    out = require_path(out, "out is a folder", 'out="weights/"', PackageError)
    if package.manifest.checkpoint.adapters:
        raise PackageError(
            "the package is of a model with adapters, whose names no checkpoint of its base model has.",
            "pipegraph.integrations.peft.save_adapter(pipe, …), and PEFT's merge_and_unload() for a merged model.",
        )
    _require_replaceable(out, overwrite)
    world, _ = join_world(None, "cpu", timeout)
    guard = guard_of(world)
    with ExitStack() as stack:
        stack.callback(guard.close)
        if world is not None:
            with guard:
                world.open()
                check_packages(world, package)
        ranks = CheckpointRanks(world or LoneProcess(), guard)
        place, index = find_newest(Path(checkpoint), ranks)
        if index.without_frozen:
            raise CheckpointError(
                f"{place} was saved without its frozen parameters.",
                "pipe.load of it into the model that it was trained with, and pipe.save of all.",
            )
        storage = ranks.agree(lambda: StoredTensors(place, index.files))
        tensors = ranks.agree(lambda: _tensors(storage.entries, package))
        shards = _shards(tensors, min(shard_bytes, math.ceil(sum(tensor.bytes for tensor in tensors) / ranks.size)))
        files = {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}
        place_of_files = stack.enter_context(ExitStack())

        def make_folder() -> str:
            return str(place_of_files.enter_context(staged_folder(out, lambda: _require_replaceable(out, overwrite))))

        folder = Path(ranks.gather(ranks.agree(lambda: make_folder() if ranks.is_first else ""))[0])
        rank_files = dict(list(files.items())[ranks.rank :: ranks.size])

        def write_files() -> dict[str, str]:
            with write_errors(out):
                return _write(rank_files, storage, folder)

        written = ranks.agree(write_files)
        file_by_name = {name: file for part in ranks.gather(written) for name, file in part.items()}
        total = sum(tensor.bytes for tensor in tensors)
        config = package.path / CONFIG

        def finish() -> None:
            with write_errors(out):
                write_tensor_index(file_by_name, total, folder, {"generator": f"{_GENERATOR} {__version__}"})
                if config.is_file():
                    (folder / CONFIG).write_bytes(config.read_bytes())
            place_of_files.close()  # it takes its place

        ranks.agree(lambda: finish() if ranks.is_first else None)
        return ExportResult(place, tuple(files), total, config.is_file(), _is_huggingface(package.manifest))


def _require_replaceable(folder: Path, overwrite: bool) -> None:
    if folder.is_file():
        raise PackageError(f"{folder} is a file.", f"{argument('out')} with a new folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not _is_export(folder):
        raise PackageError(
            f"{folder} holds files that export did not write, and is left alone.",
            f"{argument('out')} with a new folder.",
        )
    if not overwrite:
        raise PackageError(
            f"{folder} already holds an export.",
            f"{argument('overwrite', True)} to replace it, or {argument('out')} with a new folder.",
        )


def _is_export(folder: Path) -> bool:
    """Whether all files of a folder are what `export` writes."""
    try:
        generator = json.loads(read_regular_file(folder / WEIGHTS_INDEX, LARGE_LIMIT))["metadata"]["generator"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return str(generator).startswith(_GENERATOR) and all(_FILE.fullmatch(file.name) for file in folder.iterdir())


def _is_huggingface(manifest: Manifest) -> bool:
    return bool(manifest.checkpoint.base_model_prefix or manifest.checkpoint.stored)


def _tensors(stored: Mapping[str, Any], package: Package) -> list[_StoredTensor]:
    """The model's tensors in a checkpoint, in the order of its stages. Raises CheckpointError, PackageError."""
    manifest = package.manifest
    stages = {entry.index: package.load_stage(entry.index, "meta", weights=False) for entry in manifest.stages}
    model = {
        name: tensor.to(stored[name].properties.dtype) if name in stored else tensor  # which dtype is the checkpoint's
        for name, tensor in model_tensors(manifest, stages).items()
    }
    check_same_model(model, list(model), stored)
    return [_stored_tensor(name, tensor, manifest) for name, tensor in model.items()]


def _stored_tensor(source: str, tensor: Tensor, manifest: Manifest) -> _StoredTensor:
    name = source.removeprefix(PREFIX)
    if not _is_huggingface(manifest):
        names = next((group for group in manifest.tied if name in group), (name,))
        return _StoredTensor(source, tensor.shape, tensor.dtype, names)
    parts = manifest.checkpoint.stored.get(name, (name,))
    if not parts:
        raise PackageError(
            f"transformers stores {name} in a form that only transformers can write.",
            "pipe.load in one process, and save_pretrained of the model with pipe.state_dict().",
        )
    if len(parts) == 1 and "*" not in parts[0]:
        return _StoredTensor(source, tensor.shape, tensor.dtype, parts)
    return _StoredTensor(source, tensor.shape, tensor.dtype, parts=parts)


def _shards(tensors: Sequence[_StoredTensor], most: int) -> list[list[_StoredTensor]]:
    """The tensors of each file, in order, as many as fit."""
    shards: list[list[_StoredTensor]] = []
    size = most
    for tensor in tensors:
        if size + tensor.bytes > most or not shards:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return shards


def _write(files: Mapping[str, Sequence[_StoredTensor]], storage: StoredTensors, folder: Path) -> dict[str, str]:
    """Write files one after the other. Returns the file of each tensor."""
    file_by_name: dict[str, str] = {}
    for file in track("writing files", files):
        read: dict[str, Any] = {tensor.source: torch.empty(tensor.size, dtype=tensor.dtype) for tensor in files[file]}
        storage.read(read)
        tensors = {name: part for tensor in files[file] for name, part in tensor.written(read.pop(tensor.source))}
        write_tensors(tensors, folder / file, _METADATA)
        file_by_name |= dict.fromkeys(tensors, file)
        del tensors
    return file_by_name
