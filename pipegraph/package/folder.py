"""A package on disk: the folder that `pipegraph split` writes, opened, checked, and its stages loaded."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

import msgspec

from pipegraph.errors import PackageError
from pipegraph.package.json_file import FileKind, Name
from pipegraph.package.manifest import Manifest, leaves_folder

if TYPE_CHECKING:
    from torch import nn

_RESTORE = "Try: restore it, or split the model again."
MANIFEST: Final = "pipeline.json"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"
_OF_PACKAGE = "mend what was edited, restore the files, or split the model again."
_OF_CHECKPOINT = (
    "a checkpoint of the model that was split, as save_pretrained writes it; or split hf:DIR with its weights, which "
    "transformers then reads."
)
_numbers = itertools.count()


class WeightsIndex(msgspec.Struct, frozen=True):
    """``model.safetensors.index.json``: FQN → shard file. Other keys are other libraries'."""

    weight_map: dict[Name, Name]


_INDEX: Final = FileKind(WeightsIndex, "an index of safetensors", PackageError, _RESTORE)


@dataclass(frozen=True)
class Package:
    """A package on disk: its folder and its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Package:
        """Read and check the manifest in the folder `path`; nothing is imported and no weight read yet."""
        folder = Path(os.path.realpath(path))
        return cls(folder, Manifest.read(folder / MANIFEST))

    def edited(self) -> tuple[str, ...]:
        """The generated files whose content is no longer what was written."""
        written = sorted(self.manifest.files.items())
        there = ((name, digest) for name, digest in written if (self.path / name).is_file())
        return tuple(name for name, digest in there if file_digest(self.path / name) != digest)

    def missing(self) -> tuple[str, ...]:
        """The generated files and the shards of weights that are gone."""
        shards = (stage.weights for stage in self.manifest.stages if stage.weights)
        return tuple(sorted(name for name in {*self.manifest.files, *shards} if not (self.path / name).is_file()))

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """FQN → shard file, as `model.safetensors.index.json` says; empty without one."""
        index = self.path / WEIGHTS_INDEX
        if not index.exists():
            shards = [stage.weights for stage in self.manifest.stages if stage.weights]
            if shards:
                raise PackageError(f"{index} is missing: without it nothing says what {shards[0]} holds.\n{_RESTORE}")
            return {}
        found = _INDEX.read(index).weight_map
        for file in filter(leaves_folder, found.values()):
            raise _INDEX.problem(str(index), f"weight_map: the path {file!r} leaves the package's folder")
        return found

    @property
    def has_weights(self) -> bool:
        """Whether parameters were written; false after `pipegraph split --no-weights`."""
        names = [name for stage in self.manifest.stages for name in stage.parameters]
        return not names or any(self.manifest.stored_name(name) in self.weight_map for name in names)

    def load_stage(self, index: int, device: str = "cpu", weights: bool | str | PathLike[str] = True) -> nn.Module:
        """Stage `index`, from its source as it is now.

        Without `weights`, parameters are initialised as the model does it. With a path, they and the buffers of
        `state_dict()` are those of a Hugging Face checkpoint, in the stage's dtypes: only the files that hold them are
        opened.
        """
        entry = self.manifest.stages[index]
        if not isinstance(weights, bool):
            return self._made(
                index, device, checkpoint_folder(weights), f", with weights of {weights},", _OF_CHECKPOINT
            )
        stored = [self.manifest.stored_name(name) for name in entry.parameters] if weights else []
        for name in stored:
            if name not in self.weight_map:
                raise PackageError(f"{self.path / WEIGHTS_INDEX} lacks {name}, a weight of stage {index}.")
        for shard in sorted({self.weight_map[name] for name in stored} | {entry.weights or MANIFEST}):
            if not (self.path / shard).is_file():
                raise PackageError(
                    f"{self.path / shard} is missing: stage {index} needs it. Restore it, or split again."
                )
        read = {self.weight_map[name] for name in stored} | ({entry.weights} if entry.weights else set())
        weights_of = f", with weights of {', '.join(sorted(read))}," if read else ""
        return self._made(index, device, weights, weights_of, _OF_PACKAGE)

    def _made(self, index: int, device: str, weights: bool | Path, weights_of: str, advice: str) -> nn.Module:
        try:
            stage: nn.Module = self._module.load_stage(index, device=device, weights=weights)
        except PackageError:
            raise
        except Exception as error:  # edited source and damaged shards raise anything
            file = f"{self.manifest.stages[index].module}.py"
            where = self.path / file if isinstance(weights, bool) else file  # a package may be on its way to its folder
            raise PackageError(
                f"stage {index} ({where}){weights_of} cannot be loaded: {type(error).__name__}: {error}.\nTry: {advice}"
            ) from error
        return stage

    @cached_property
    def _module(self) -> ModuleType:
        """The folder imported under a name of its own, so that two packages, or two versions of one, do not meet."""
        name, source = f"_pipegraph_package_{next(_numbers)}", self.path / "__init__.py"
        spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=[str(self.path)])
        assert spec is not None and spec.loader is not None  # always so for a file that ends in .py
        module = importlib.util.module_from_spec(spec)
        written, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a stale .pyc would hide a quick edit
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # edited source raises anything
            del sys.modules[name]
            line = f"{error.filename}:{error.lineno}: " if isinstance(error, SyntaxError) else ""
            said = str(error).replace(f"{name}.", "")
            raise PackageError(
                f"{self.path} cannot be imported: {line}{type(error).__name__}: {said}.\n"
                "Try: mend what was edited or is missing (`pipegraph show` lists it), or split the model again."
            ) from error
        finally:
            sys.dont_write_bytecode = written
        return module


def checkpoint_folder(path: str | PathLike[str]) -> Path:
    """The folder of a Hugging Face checkpoint, one safetensors file or several with an index; nothing is read yet."""
    folder, single = Path(path), "model.safetensors"
    if not folder.is_dir():
        raise PackageError(f"{folder} is no folder with a checkpoint.\nTry: the folder that save_pretrained writes.")
    if not any((folder / name).is_file() for name in (WEIGHTS_INDEX, single)):
        found = ", ".join(sorted(each.name for each in folder.iterdir())[:6]) or "nothing"
        raise PackageError(
            f"{folder} holds neither {single} nor {WEIGHTS_INDEX}, but {found}. Pickled weights are never read.\n"
            "Try: save_pretrained of transformers, which writes safetensors."
        )
    return folder


def file_digest(path: Path) -> str:
    """The content of a file as `files` and `shards` of a manifest have it."""
    with path.open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
