"""A package on disk: the folder that `pipegraph split` writes, opened, checked, and its stages loaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pipegraph.arguments import require_path
from pipegraph.errors import PackageError, nearest, one_line, path_from_here, user_line
from pipegraph.notebook import draw
from pipegraph.package.json_file import FileKind, Name
from pipegraph.package.manifest import ListedFile, Manifest, path_problem, problems_of
from pipegraph.package.source_import import ImportedPackage
from pipegraph.units import format_number_of

if TYPE_CHECKING:
    from torch import Tensor, nn

_RESTORE = "Try: restore it, or split the model again."
MANIFEST: Final = "pipeline.json"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
"""The configuration of a Hugging Face model, for `from_pretrained`."""
_OF_PACKAGE = "fix what was edited, restore the files, or split the model again."
_OF_CHECKPOINT = (
    "a checkpoint of the model that was split, as save_pretrained writes it; pipegraph.Weights(DIR, rename={…}, "
    "rows={…}), or --rename and --rows, for other names and padded embeddings; or split hf:DIR with its weights, which "
    "transformers then reads."
)
_ADMIT: Final = (
    "Try: restore the file, or split the model again. If you changed it, check_weights=False (--no-check-weights) "
    "takes it as it is."
)


class WeightsIndex(msgspec.Struct, frozen=True):
    """``model.safetensors.index.json``: FQN → shard file. Other keys are other libraries'."""

    weight_map: dict[Name, Name]


_INDEX: Final = FileKind(WeightsIndex, "an index of safetensors", PackageError, _RESTORE)


WeightSource = bool | str | PathLike[str] | Mapping[str, "Tensor"]
"""Whether a package's own weights are read; or a Hugging Face checkpoint, or tensors by the model's names."""


@dataclass(frozen=True)
class Package:
    """A package on disk: its folder and its manifest.

    ``identity`` is the folder's own, by which it is known again; another package may take its place.
    """

    path: Path
    manifest: Manifest
    identity: tuple[int, int] | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        model, stages = self.manifest.model.class_name or "model", format_number_of("stage", len(self.manifest.stages))
        return one_line(f"Package({self.path}: {model} in {stages})")

    def _repr_html_(self) -> str | None:
        return draw("package_html", self)

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Package:
        """Read and check the manifest in the folder `path`; nothing is imported and no weight read yet."""
        written = 'pipegraph.write_package(plan, "out/"), which writes one'
        package_path = require_path(path, "A package is given by its folder", written, PackageError)
        folder = Path(os.path.realpath(package_path))
        if not os.path.lexists(package_path):
            neighbours = (file.parent.name for file in folder.parent.glob(f"*/{MANIFEST}"))
            raise PackageError(
                f"There is no package {package_path}: the folder does not exist.{nearest(folder.name, neighbours)}",
                f"pipegraph split MODEL -o {package_path}, which writes one.",
            )
        if folder.exists() and not folder.is_dir():
            raise PackageError(
                f"{package_path} is a file, and a package is a folder.", "the folder that pipegraph split wrote."
            )
        while True:
            identity = _identity(folder)
            manifest = Manifest.read(folder / MANIFEST)
            if _identity(folder) == identity:
                return cls(folder, manifest, identity)

    def edited(self) -> tuple[str, ...]:
        """The generated files whose content differs from the written one."""
        written = sorted(self.manifest.files.items())
        present = ((name, entry) for name, entry in written if (self.path / name).is_file())
        return tuple(name for name, entry in present if ListedFile.read(self.path / name).digest != entry.digest)

    def missing(self) -> tuple[str, ...]:
        """The generated files and the shards of weights that are gone."""
        listed = {*self.manifest.files, *self._shards}
        return tuple(sorted(name for name in listed if not (self.path / name).is_file()))

    def damaged(self) -> tuple[str, ...]:
        """The shards of weights whose content differs from the written one. Reads all shards."""
        return tuple(problems_of(self.path, self.manifest.shards))

    def check_whole(self, damaged: Sequence[str] = ()) -> None:
        """Raise PackageError if files are missing, or some are known to be damaged."""
        states = {"missing": self.missing(), "damaged, or changed": damaged}
        problems = [
            f"{', '.join(files)} {'is' if len(files) == 1 else 'are'} {state}"
            for state, files in states.items()
            if files
        ]
        if problems:
            raise PackageError(f"{path_from_here(self.path)} is not whole: {'; '.join(problems)}.\n{_RESTORE}")

    def check_weights(self, stages: Iterable[int], weights: WeightSource = True) -> None:
        """Check the sizes and digests of the files of weights that `load_stage` reads for these stages.

        Raises:
            PackageError: a file is not what was written, or the manifest does not list it.
        """
        with self._unreplaced():
            listed = self.manifest.shards
            shards = sorted({shard for index in stages for shard in self._read_shards(index, weights)})
            names = [WEIGHTS_INDEX, *shards] if shards else []
            for name in names:
                if name not in listed:
                    raise PackageError(f"{self.path / name} would be read, and {MANIFEST} does not list it.\n{_ADMIT}")
            for name, problem in problems_of(self.path, {name: listed[name] for name in names}).items():
                raise PackageError(f"{self.path / name} is damaged, or was changed: {problem}.\n{_ADMIT}")

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """FQN → shard file, as `model.safetensors.index.json` says; empty without one."""
        index = self.path / WEIGHTS_INDEX
        if not index.exists():
            if shard := next((name for name in self._shards if name != WEIGHTS_INDEX), ""):
                raise PackageError(f"{index} is missing: without it nothing says what {shard} holds.\n{_RESTORE}")
            return {}
        shard_by_name = _INDEX.read(index).weight_map
        for file in dict.fromkeys(shard_by_name.values()):
            if problem := path_problem(file) or self._link_problem(file):
                raise _INDEX.problem(str(index), f"weight_map: {problem}")
        for shard in sorted({*self._shards} - {*shard_by_name.values(), WEIGHTS_INDEX}):
            raise _INDEX.problem(str(index), f"weight_map: it has no tensor of {shard}, a shard that {MANIFEST} lists")
        return shard_by_name

    @property
    def has_weights(self) -> bool:
        """Whether parameters were written; false after `pipegraph split --no-weights`."""
        names = [name for stage in self.manifest.stages for name in stage.parameters]
        return not names or any(self.manifest.stored_name(name) in self.weight_map for name in names)

    def load_stage(self, index: int, device: str = "cpu", weights: WeightSource = True, seed: int = 0) -> nn.Module:
        """Stage `index`, from its source as it is now.

        Without `weights`, parameters are initialised as the model does it, with random numbers that follow from `seed`
        and their names, so that they are equal on every rank and for every split. With a path, they and the buffers of
        `state_dict()` are those of a Hugging Face checkpoint, in the stage's dtypes: only the files that hold them are
        opened. With a mapping, they are its tensors.
        """
        with self._unreplaced():
            return self._load(index, device, weights, seed)

    def _load(self, index: int, device: str, weights: WeightSource, seed: int) -> nn.Module:
        entry = self.manifest.stages[index]
        if not isinstance(weights, bool):
            tensors = weights if isinstance(weights, Mapping) else checkpoint_folder(weights)
            label = "a dict" if type(weights) is dict else str(weights)
            return self._import_stage(index, device, tensors, f", with weights of {label},", _OF_CHECKPOINT)
        read = self._read_shards(index, weights)
        for shard in (*read, MANIFEST):
            if not (self.path / shard).is_file():
                raise PackageError(f"{self.path / shard} is missing: stage {index} needs it.\n{_RESTORE}")
        unlisted = first_unlisted(self.path / entry.weights, self.weight_map) if entry.weights else None
        if unlisted is not None:
            where = f"{entry.weights} of stage {index}"
            raise PackageError(f"{self.path / WEIGHTS_INDEX} lacks {unlisted}, which {where} holds.\n{_RESTORE}")
        weights_of = f", with weights of {', '.join(read)}," if read else ""
        return self._import_stage(index, device, weights, weights_of, _OF_PACKAGE, seed)

    def _link_problem(self, file: str) -> str:
        """What is wrong with a shard that is a link out of the folder: nothing says what must be there."""
        inside = Path(os.path.realpath(self.path / file)).is_relative_to(self.path)
        return "" if inside or file in self.manifest.shards else f"{file} is a link that leaves the package's folder"

    @cached_property
    def _shards(self) -> tuple[str, ...]:
        """The shards that the manifest lists, the stages' first."""
        of_stages = (stage.weights for stage in self.manifest.stages if stage.weights)
        return tuple(dict.fromkeys([*of_stages, *self.manifest.shards]))

    def _read_shards(self, index: int, weights: WeightSource) -> tuple[str, ...]:
        """The shards of this folder that `load_stage` reads for a stage. Raises PackageError for a missing weight."""
        entry = self.manifest.stages[index]
        from_elsewhere = not isinstance(weights, bool)
        if from_elsewhere and all(buffer.persistent for buffer in entry.buffers):
            return ()
        stored = [self.manifest.stored_name(name) for name in entry.parameters] if weights is True else []
        for name in stored:
            if name not in self.weight_map:
                raise PackageError(f"{self.path / WEIGHTS_INDEX} lacks {name}, a weight of stage {index}.\n{_RESTORE}")
        stage_shards = {entry.weights} if entry.weights else set()
        return tuple(sorted({self.weight_map[name] for name in stored} | stage_shards))

    def _import_stage(
        self,
        index: int,
        device: str,
        weights: WeightSource,
        weights_of: str,
        advice: str,
        seed: int = 0,
    ) -> nn.Module:
        seeded = {"seed": seed} if seed and weights is False else {}  # a package of an older version takes none
        try:
            stage: nn.Module = self._source.module.load_stage(index, device=device, weights=weights, **seeded)
            _check_stage(stage, device)
        except PackageError:
            raise
        except (Exception, SystemExit) as error:  # edited source and damaged shards raise anything
            file = f"{self.manifest.stages[index].module}.py"
            where = self.path / file if isinstance(weights, bool) else file  # a package may be on its way to its folder
            raise PackageError(
                f"stage {index} ({where}){weights_of} cannot be loaded: {type(error).__name__}: {error}.", advice
            ) from error
        self._source.keep_for(stage)
        return stage

    @contextmanager
    def _unreplaced(self) -> Iterator[None]:
        """Raise PackageError if another package takes the place of this one: what was read may be of both."""
        try:
            yield
        finally:
            if self.identity is not None and _identity(self.path) != self.identity:
                raise PackageError(
                    f"{path_from_here(self.path)} was replaced by another package while it was read.", "the same again."
                )

    @cached_property
    def _source(self) -> ImportedPackage:
        """The folder as a Python package. Raises PackageError."""
        try:
            source = ImportedPackage(self.path, self.manifest.files)
        except PackageError:
            raise
        except (Exception, SystemExit) as error:  # edited source raises anything
            at = (
                f"{path_from_here(error.filename or self.path / '__init__.py')}:{error.lineno}"
                if isinstance(error, SyntaxError)
                else user_line(error)
            )
            line = f"{at}: " if at else ""
            problem = re.sub(r"\b_pipegraph_package_\d+\.?", "", str(error))
            raise PackageError(
                f"{path_from_here(self.path)} cannot be imported: {line}{type(error).__name__}: {problem}.",
                "fix what was edited or is missing (`pipegraph show` lists it), or split the model again.",
            ) from error
        source.keep_for(self)
        return source


def _check_stage(stage: object, device: str) -> None:
    """Raise ValueError for what a `load_stage` that was edited may return in place of a stage with its numbers."""
    from torch import nn

    if not isinstance(stage, nn.Module):
        raise ValueError(f"load_stage returned a {type(stage).__name__}, and not the stage")
    tensors = [*stage.named_parameters(), *stage.named_buffers()]
    unread = [name for name, tensor in tensors if tensor.is_meta] if device != "meta" else []
    if unread:
        raise ValueError(f"{unread[0]} has no value")


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return the device and inode of a folder, which do not depend on its name; None if it does not exist."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def checkpoint_folder(path: str | PathLike[str]) -> Path:
    """The folder of a Hugging Face checkpoint, one safetensors file or several with an index; nothing is read yet."""
    saved = "the folder that save_pretrained writes"
    folder, single = require_path(path, "A checkpoint is given by its folder", saved, PackageError), "model.safetensors"
    if not folder.is_dir():
        raise PackageError(f"{folder} is not a folder with a checkpoint.", f"{saved}.")
    if not any((folder / name).is_file() for name in (WEIGHTS_INDEX, single)):
        names = ", ".join(sorted(file.name for file in folder.iterdir())[:6]) or "nothing"
        raise PackageError(
            f"{folder} holds neither {single} nor {WEIGHTS_INDEX}, but {names}. Pickled weights are never read.",
            "save_pretrained of transformers, which writes safetensors.",
        )
    return folder


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the name of each tensor of a Hugging Face checkpoint → its file in the folder. Raises PackageError."""
    index, single = folder / WEIGHTS_INDEX, "model.safetensors"
    if index.is_file():
        files = _INDEX.read(index).weight_map
        for file in dict.fromkeys(files.values()):
            if problem := path_problem(file):
                raise _INDEX.problem(str(index), f"weight_map: {problem}")
        return files
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except (SafetensorError, OSError) as error:
        raise PackageError(f"{folder / single} cannot be read, or is truncated: {error}.", _OF_CHECKPOINT) from None


def first_unlisted(file: Path, listed: Container[str]) -> str | None:
    """The first tensor of a safetensors file that is not among those listed; None also if the file cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return next((name for name in opened.keys() if name not in listed), None)  # noqa: SIM118
    except (SafetensorError, OSError):
        return None  # the code that reads the tensors reports the error


# ---- files of weights ------------------------------------------------------------------------------------------------
# Tensors as safetensors files and their index, as packages and Hugging Face checkpoints have them.


def write_tensors(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError, as for any other file, if the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1])), str(file)) from error


def write_tensor_index(
    files: Mapping[str, str], total_bytes: int, folder: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write ``model.safetensors.index.json``.

    Args:
        files: name of each tensor → the file that holds it.
        total_bytes: the size of all tensors.
        metadata: more entries to store next to the total size.
    """
    index = {"metadata": {"total_size": total_bytes, **(metadata or {})}, "weight_map": dict(files)}
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
