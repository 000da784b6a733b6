"""Weights that another tool saved, under the names that the model has.

safetensors files ─┐
                   ├─▶ names there ─ prefix, rename ─▶ the model's names ─ rows, convert ─▶ tensors
folder of DCP ─────┘

A tensor is read when it is asked for. A rank asks for those of its stages alone.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from pipegraph.arguments import require_path, require_type
from pipegraph.errors import ArgumentError, PackageError, first_names
from pipegraph.package import Manifest
from pipegraph.package.folder import checkpoint_folder, tensor_files
from pipegraph.runtime.checkpoint import folder as saved_runs
from pipegraph.runtime.checkpoint.metadata import FILE as METADATA
from pipegraph.runtime.checkpoint.saving import PREFIX
from pipegraph.runtime.checkpoint.storage import StoredTensors

_FOLDER: Final = "A checkpoint is given by its folder, as weights"
_EXAMPLE: Final = 'the folder that save_pretrained writes, or pipegraph.Weights("checkpoint/", prefix="module.")'
_LISTED: Final = 12
"""How many groups of names a message lists."""


class Weights(Mapping[str, Tensor]):
    """The tensors of a checkpoint, by the names that the model has for them.

    For `weights=` of `Pipeline` and `write_package`, and for `load_state_dict`. Only the tensors that are asked for are
    read, one at a time.

    Args:
        folder: with ``model.safetensors``; or with several files and ``model.safetensors.index.json``; or of
            `torch.distributed.checkpoint`, such as torchtitan's and NeMo's. A checkpoint of pipegraph is one of these.
        prefix: what the names there begin with: ``"module."``, ``"model."``. It is removed, and tensors without it are
            not read, such as an optimizer's next to those of the model.
        rename: regular expression → replacement, applied to each name one after the other, as by `re.sub`:
            ``{r"^tok_embeddings\\.": "model.embed_tokens."}``. `key_mapping` of transformers is the same.
        rows: the model's name of a tensor → how many rows it has in the model, if another tool padded it, such as an
            embedding to a multiple of 128. Further rows are not read. Rows that are missing are zeros.
        convert: called with the model's name and each tensor that is read; it returns the one that the model has.

    Raises:
        PackageError: the folder has no such files, or one of them is damaged.
        CheckpointError: the metadata of `torch.distributed.checkpoint` names what is not its own class.
        ArgumentError: an argument is invalid, or two tensors get the same name.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        prefix: str = "",
        rename: Mapping[str, str] | None = None,
        rows: Mapping[str, int] | None = None,
        convert: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        require_type(prefix, str, "prefix is a string", _EXAMPLE)
        self.folder = require_path(folder, _FOLDER, _EXAMPLE, PackageError)
        self._reader = _reader(self.folder)
        self._rows, self._convert = dict(rows or {}), convert
        is_run = not prefix and (self.folder / saved_runs.INDEX).is_file()
        self._stored = _renamed(self._reader.names, PREFIX if is_run else prefix, _patterns(rename or {}))
        if not self._stored:
            names = ", ".join(_grouped(self._reader.names)[:_LISTED]) or "nothing"
            raise ArgumentError(f"no name in {self.folder} begins with {prefix!r}: it has {names}.", "another prefix.")
        for name, count in self._rows.items():
            if type(count) is not int or count < 1:
                raise ArgumentError(
                    f"rows has {name!r}: {count!r}, which is not a number of rows.", 'rows={"lm_head.weight": 32000}.'
                )
            if name not in self._stored:
                raise ArgumentError(
                    f"rows names {name}, which {self.folder} does not have after prefix and rename.",
                    f"{first_names(list(self._stored), 4)}.",
                )

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._reader.read(self._stored[name])
        if name in self._rows:
            tensor = _with_rows(tensor, self._rows[name])
        return tensor if self._convert is None else self._convert(name, tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # the mixin's would read the tensor

    def __str__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        return f"Weights({str(self.folder)!r}, {len(self)} tensors)"


def is_dcp(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of `torch.distributed.checkpoint`."""
    return (folder / METADATA).is_file()


def open_weights(weights: str | PathLike[str] | Mapping[str, Tensor]) -> Path | Mapping[str, Tensor]:
    """Return what a package reads: the folder of a Hugging Face checkpoint, or tensors by the model's names.

    Raises:
        PackageError: there is no checkpoint.
    """
    if isinstance(weights, Mapping):
        return weights
    folder = require_path(weights, _FOLDER, _EXAMPLE, PackageError)
    is_huggingface = not (is_dcp(folder) or saved_runs.candidates(folder))
    return checkpoint_folder(folder) if is_huggingface else Weights(folder)


def weights_label(weights: str | PathLike[str] | Mapping[str, Tensor]) -> str:
    """Return what a message calls weights: their folder, if they have one."""
    return "The dict of weights" if type(weights) is dict else str(weights)


def check_names(manifest: Manifest, weights: Path | Mapping[str, Tensor]) -> None:
    """Warn of the tensors that no stage of a package reads, with ``*`` for numbers: ``layers.*.weight (2 tensors)``.

    Tensors whose names begin with a word that no read tensor has are a group, such as those of an optimizer.

    Raises:
        PackageError: no name is the model's, but with a prefix removed some are.
    """
    names = list(tensor_files(weights) if isinstance(weights, Path) else weights)
    is_read = _read_names(manifest)
    unread = [name for name in names if not is_read(name)]
    if len(unread) == len(names) and (prefix := _prefix(names, is_read)):
        label = weights_label(weights)
        raise PackageError(
            f"{label} has the model's tensors under names that begin with {prefix!r}.",
            f"weights=pipegraph.Weights({label!r}, prefix={prefix!r}), or --rename '^{re.escape(prefix)}='.",
        )
    first_parts = {name.partition(".")[0] for name in names if is_read(name)}
    unread_parts = {part for name in unread if (part := name.partition(".")[0]) not in first_parts}
    groups = _grouped(f"{part}.*" if (part := name.partition(".")[0]) in unread_parts else name for name in unread)
    if groups:
        warnings.warn(f"{weights_label(weights)} has tensors that no stage reads: {', '.join(groups)}.", stacklevel=3)


# ---- files -----------------------------------------------------------------------------------------------------------


class _TensorReader(Protocol):
    names: tuple[str, ...]

    def read(self, name: str) -> Tensor: ...


class _SafetensorsReader:
    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, tensor_files(folder)
        self._opened: dict[str, Any] = {}
        self.names = tuple(self._files)

    def read(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._files[name]
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(self._folder / file, framework="pt")
            tensor: Tensor = self._opened[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise PackageError(f"{self._folder / file} cannot be read, or is truncated: {error}.") from None
        return tensor


class _DcpReader:
    def __init__(self, folder: Path) -> None:
        self._tensors = StoredTensors(folder, None)
        self.names = tuple(self._tensors.entries)

    def read(self, name: str) -> Tensor:
        entry = self._tensors.entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        self._tensors.read({name: tensor})
        return tensor


def _reader(folder: Path) -> _TensorReader:
    if is_dcp(folder):
        return _DcpReader(folder)
    if runs := saved_runs.candidates(folder):
        raise PackageError(f"{folder} holds the checkpoints of a run.", f"one of them, such as {runs[0]}.")
    return _SafetensorsReader(checkpoint_folder(folder))


# ---- names -----------------------------------------------------------------------------------------------------------


def _patterns(rename: Mapping[str, str]) -> list[tuple[re.Pattern[str], str]]:
    require_type(rename, Mapping, "rename is a dict of regular expressions", 'rename={r"^module\\.": ""}')
    patterns = []
    for pattern, replacement in rename.items():
        try:
            patterns.append((re.compile(pattern), replacement))
            re.sub(pattern, replacement, "")
        except (re.error, TypeError, IndexError) as error:
            raise ArgumentError(
                f"rename has {pattern!r}: {replacement!r}, which re.sub does not take: {error}.",
                'rename={r"^module\\.": ""}, a regular expression and its replacement.',
            ) from None
    return patterns


def _renamed(names: Iterable[str], prefix: str, patterns: list[tuple[re.Pattern[str], str]]) -> dict[str, str]:
    """Return the model's name of each tensor → its name in the files. Raises ArgumentError for two with one name."""
    stored: dict[str, str] = {}
    for name in names:
        if not name.startswith(prefix):
            continue
        renamed = name.removeprefix(prefix)
        for pattern, replacement in patterns:
            renamed = pattern.sub(replacement, renamed)
        if renamed in stored:
            raise ArgumentError(
                f"{stored[renamed]} and {name} would both be {renamed}.", "a pattern that only one of them has."
            )
        stored[renamed] = name
    return stored


def _read_names(manifest: Manifest) -> Callable[[str], bool]:
    """Return whether a tensor of a checkpoint may be read, by its name: the model's, or one of Hugging Face's."""
    checkpoint = manifest.checkpoint
    stage_names = [
        name
        for stage in manifest.stages
        for name in (*stage.parameters, *(buffer.name for buffer in stage.buffers if buffer.persistent))
    ]
    parts = [part for name in stage_names for part in checkpoint.stored.get(name, ())]
    tied = [name for group in manifest.tied for name in group]
    names = {*stage_names, *tied, *parts}
    base = checkpoint.base_model_prefix

    def is_read(name: str) -> bool:
        candidates = (name, name.removeprefix(f"{base}."), f"{base}.{name}") if base else (name,)
        return any(candidate in names or not names.isdisjoint(_counted(candidate)) for candidate in candidates)

    return is_read


def _counted(name: str) -> list[str]:
    """Return the name with a ``*`` for each of its numbers in turn, as parts are called that count a dimension."""
    return [f"{name[: number.start()]}*{name[number.end() :]}" for number in re.finditer(r"\d+", name)]


def _prefix(names: Iterable[str], is_read: Callable[[str], bool]) -> str:
    """Return what stands before the model's name of a tensor in the first of these names that ends with one."""
    for name in names:
        parts = name.split(".")
        for place in range(1, len(parts)):
            if is_read(".".join(parts[place:])):
                return ".".join(parts[:place]) + "."
    return ""


def _grouped(names: Iterable[str]) -> list[str]:
    """Return names that differ only in numbers once, with their count."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return [f"{group} ({len(names)} tensors)" if len(names) > 1 else names[0] for group, names in groups.items()]


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    if len(tensor) >= rows:
        return tensor[:rows]
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
