"""The metadata of torch.distributed.checkpoint (DCP), read without running what a file names.

DCP writes `.metadata` as a pickle, and reads it with `pickle.load`, which calls whatever functions the file names. Here
an unpickler knows the names of the classes that DCP writes, and nothing else. For each it makes a record of what the
class would be called with; no class of torch is called and none can be changed. The metadata is then built from the
records, field by field, so that a reader gets values of the types that DCP's classes declare.

.metadata ─▶ records ─▶ Metadata(state_dict_metadata: name → size, dtype, chunks;  storage_data: chunk → file, offset)
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pipegraph.errors import CheckpointError, one_line
from pipegraph.package.json_file import clipped
from pipegraph.package.manifest import path_problem
from pipegraph.torch_private.tensors import storage_info

FILE: Final = ".metadata"

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO: Final = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE: Final = ("torch", "Size")
_DTYPES: Final = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ADVICE: Final = "Try: a checkpoint as it was saved, from a source that you trust."

_T = TypeVar("_T")


class _Unchangeable(type):
    """The class of classes whose attributes cannot be set, as the BUILD operation of a pickle otherwise does."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"the attribute {name} of a class would be set")


class _Record(metaclass=_Unchangeable):
    """What a class would be called with, and the state that an object of it would get."""

    __slots__ = ("arguments", "state")

    def __new__(cls, *arguments: object) -> _Record:
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def __setstate__(self, state: object) -> None:
        self.state = state

    arguments: tuple[object, ...]
    state: object


def _record_class(module: str, name: str) -> Any:
    return _Unchangeable(name, (_Record,), {"__slots__": (), "__module__": module})


_RECORDS: Final = {
    (module, name): _record_class(module, name)
    for module, name in (
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *((_METADATA, name) for name in ("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
        (_METADATA, "BytesStorageMetadata"),
        _STORAGE_INFO,
        _SIZE,
        ("torch.serialization", "_get_layout"),
        # The path of the folder, in StorageMeta, which is not read.
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    )
}


class _Unpickler(pickle.Unpickler):
    """Makes records, and plain values of Python. Raises UnpicklingError for any other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in _RECORDS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a class of its metadata")
        return _RECORDS[module, name]


def read_metadata(folder: Path, files: Collection[str] | None) -> Metadata:
    """Return the metadata of the checkpoint in a folder: of its tensors.

    Args:
        files: the names of the files that the checkpoint lists: pipegraph's, which holds tensors alone. None for a
            checkpoint of another tool: it may hold pickled values, which are left out, and names files of its folder.

    Raises:
        CheckpointError: the file names a class or function that is not DCP's, or a value that is not a tensor, or a
            file that is not among `files`; or it is damaged. Nothing that the file names was called.
    """
    path = folder / FILE
    if files is not None and FILE not in files:
        raise CheckpointError(f"{path} would be read, and checkpoint.json does not list it.\n{_ADVICE}")
    try:
        metadata = _metadata(_Unpickler(io.BytesIO(path.read_bytes())).load(), tensors_only=files is None)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {clipped(one_line(str(error)))}.\n{_ADVICE}") from None
    except Exception as error:  # a pickle raises anything
        problem = clipped(one_line(str(error)))
        raise CheckpointError(
            f"{path} is not metadata of torch.distributed.checkpoint: {problem}.\n{_ADVICE}"
        ) from None
    for name in sorted({info.relative_path for info in metadata.storage_data.values()}):
        if files is None and path_problem(name):
            raise CheckpointError(
                f"{path} names {clipped(one_line(name))}, which is not a file of its folder.\n{_ADVICE}"
            )
        if files is not None and name not in files:
            raise CheckpointError(
                f"{folder / clipped(one_line(name))} would be read, and checkpoint.json does not list it.\n{_ADVICE}"
            )
    return metadata


def _metadata(value: object, tensors_only: bool) -> Metadata:
    fields = _fields(value, _METADATA, "Metadata")
    tensors = _typed(fields.get("state_dict_metadata"), dict)
    places = _typed(fields.get("storage_data"), dict)
    return Metadata(
        {
            _typed(name, str): _tensor(name, entry)
            for name, entry in tensors.items()
            if not (tensors_only and isinstance(entry, _RECORDS[_METADATA, "BytesStorageMetadata"]))
        },
        storage_data={_index(index): _storage_info(info) for index, info in places.items()},
    )


def _tensor(name: str, value: object) -> TensorStorageMetadata:
    if isinstance(value, _RECORDS[_METADATA, "BytesStorageMetadata"]):
        raise CheckpointError(f"{name} is a pickled value, and only tensors are read")
    fields = _fields(value, _METADATA, "TensorStorageMetadata")
    properties = _record(fields.get("properties"), _METADATA, "TensorProperties")
    dtype, *_ = _typed(properties.state, tuple)  # the rest is deprecated
    return TensorStorageMetadata(
        TensorProperties(dtype=_typed(dtype, torch.dtype)),
        _size(fields.get("size")),
        [_chunk(chunk) for chunk in _typed(fields.get("chunks"), list)],
    )


def _chunk(value: object) -> ChunkStorageMetadata:
    fields = _fields(value, _METADATA, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields.get("offsets")), _size(fields.get("sizes")))


def _index(value: object) -> MetadataIndex:
    fields = _fields(value, _METADATA, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(fields.get("fqn"), str),
        None if offset is None else _size(offset),
        None if index is None else _natural(index),
    )


def _storage_info(value: object) -> Any:
    fields = _fields(value, *_STORAGE_INFO)
    transforms = tuple(_typed(name, str) for name in _typed(fields.get("transform_descriptors", ()), tuple | list))
    path = _typed(fields.get("relative_path"), str)
    return storage_info(path, _natural(fields.get("offset")), _natural(fields.get("length")), transforms or None)


def _size(value: object) -> torch.Size:
    (lengths,) = _record(value, *_SIZE).arguments or ((),)
    return torch.Size([_natural(length) for length in _typed(lengths, tuple | list)])


def _natural(value: object) -> int:
    number: int = _typed(value, int)
    if not 0 <= number < 2**63:
        raise CheckpointError(f"{number} is not a size")
    return number


def _record(value: object, module: str, name: str) -> _Record:
    return _typed(value, _RECORDS[module, name])


def _fields(value: object, module: str, name: str) -> dict[str, Any]:
    """The state of an object of a class, which is a dict of its fields."""
    state: dict[str, Any] = _typed(_record(value, module, name).state, dict)
    return state


def _typed(value: object, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"a {type(value).__name__} is in the place of a {getattr(kind, '__name__', kind)}")
    return value
