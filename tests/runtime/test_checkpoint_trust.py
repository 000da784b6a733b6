"""What a checkpoint's files can make a reader do: its data is read, and nothing that it names is called."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pipegraph import Pipeline
from pipegraph.errors import CheckpointError
from pipegraph.package import ListedFile, Package
from pipegraph.runtime.checkpoint.folder import INDEX
from pipegraph.runtime.checkpoint.metadata import FILE, read_metadata
from pipegraph.workflows.export import export
from tests.messages import refused
from tests.runtime.packages import write
from tests.runtime.sketches import chain

STEP = "step-00000001"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package, and the folder of a checkpoint of it."""
    folder = tmp_path_factory.mktemp("written")
    write(chain(2), folder / "package")
    Pipeline(folder / "package", kernels="autograd").save(folder / "run", step=1)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A separate copy for each test, which may damage it."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def change_metadata(folder: Path, content: bytes) -> None:
    """Write other metadata, and list it as if it belonged there."""
    place = folder / "run" / STEP
    (place / FILE).write_bytes(content)
    entry = ListedFile.read(place / FILE)
    change_index(folder, lambda index: index["files"].update({FILE: {"bytes": entry.bytes, "digest": entry.digest}}))


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "run" / STEP / INDEX
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def stored_metadata(folder: Path) -> Metadata:
    loaded: Metadata = pickle.loads((folder / "run" / STEP / FILE).read_bytes())
    return loaded


class Call:
    """Pickled, it calls a function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def readers(folder: Path) -> dict[str, Callable[[], object]]:
    package = Package.open(folder / "package")
    return {
        "load": lambda: Pipeline(package, kernels="autograd").load(folder / "run"),
        "export": lambda: export(folder / "run", package, folder / "out"),
    }


@pytest.mark.parametrize("reader", ["load", "export"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("posix.mkdir", lambda mark, sound: Call(__import__("os").mkdir, str(mark))),
        ("builtins.eval", lambda mark, sound: Call(eval, f"(__import__('os').mkdir({str(mark)!r}), {sound!r})")),
        ("torch.serialization.load", lambda mark, sound: Call(torch.load, str(mark))),
        ("builtins.getattr", lambda mark, sound: Call(getattr, Metadata, "__init__")),
        ("torch._utils._rebuild_tensor_v2", lambda mark, sound: torch.ones(2)),
    ],
)
def test_a_function_in_the_metadata_is_not_called(
    name: str, call: Callable[[Path, bytes], object], reader: str, folder: Path, tmp_path: Path
) -> None:
    sound = (folder / "run" / STEP / FILE).read_bytes()
    change_metadata(folder, pickle.dumps(call(tmp_path / "mark", sound)))
    with refused(CheckpointError, ".metadata", f"names {name}", advice="that you trust"):
        readers(folder)[reader]()
    assert not (tmp_path / "mark").exists() and not (folder / "out").exists()


@pytest.mark.parametrize("reader", ["load", "export"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda data: data.state_dict_metadata.update({"model.layer0.weight": BytesStorageMetadata()}),
            "is a pickled",
        ),
        (lambda data: setattr(next(iter(data.storage_data.values())), "relative_path", "../x.distcp"), "not list it"),
        (lambda data: setattr(next(iter(data.storage_data.values())), "relative_path", "/etc/passwd"), "not list it"),
        (lambda data: setattr(next(iter(data.storage_data.values())), "relative_path", "b.distcp"), "not list it"),
        (lambda data: setattr(next(iter(data.storage_data.values())), "offset", -9), "-9 is not a size"),
        (lambda data: setattr(data, "storage_data", None), "a NoneType is in the place of a dict"),
        (lambda data: setattr(data, "state_dict_metadata", [1]), "a list is in the place of a dict"),
        (lambda data: data.state_dict_metadata.update({"x": torch.float32}), "a dtype is in the place of a Tensor"),
    ],
)
def test_metadata_that_would_read_something_else(
    change: Callable[[Metadata], object], problem: str, reader: str, folder: Path
) -> None:
    (folder / "run" / STEP / "b.distcp").write_bytes(b"")
    data = stored_metadata(folder)
    change(data)
    change_metadata(folder, pickle.dumps(data))
    with refused(CheckpointError, problem, advice="that you trust"):
        readers(folder)[reader]()


@pytest.mark.parametrize("reader", ["load", "export"])
@pytest.mark.parametrize("unlisted", [{FILE}, {"__0_0.distcp"}, {FILE, "__0_0.distcp"}])
def test_a_file_that_is_not_listed_is_not_read(unlisted: set[str], reader: str, folder: Path) -> None:
    change_index(folder, lambda index: [index["files"].pop(name) for name in unlisted])
    named = FILE if FILE in unlisted else "__0_0.distcp"
    with refused(CheckpointError, named, "checkpoint.json", "list", advice="that you trust"):
        readers(folder)[reader]()


def test_other_files_in_the_folder_are_left_alone(folder: Path, tmp_path: Path) -> None:
    (folder / "run" / STEP / "notes.pkl").write_bytes(pickle.dumps(Call(Path.mkdir, tmp_path / "mark")))
    readers(folder)["load"]()
    assert not (tmp_path / "mark").exists()


def test_the_metadata_is_what_dcp_reads(folder: Path) -> None:
    """Field by field, but for what its planner and its readers do not use."""
    place = folder / "run" / STEP
    read, expected = read_metadata(place, [file.name for file in place.iterdir()]), stored_metadata(folder)
    assert read.state_dict_metadata == expected.state_dict_metadata
    assert read.storage_data == expected.storage_data
    assert [index.index for index in read.storage_data] == [index.index for index in expected.storage_data]


class Observed:
    """What runs while a body runs: functions in Python, and what Python's audit hooks are told of others.

    Its hook stays in the process, where it slows each call of `id`: it belongs in a process of its own.
    """

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.events: set[tuple[str, str]] = set()
        self._is_on = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_on and event != "object.__getattr__":  # of the frames of `_profile`
            self.events.add((event, str(arguments[0]) if arguments else ""))

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.functions.add((frame.f_code.co_filename, frame.f_code.co_name))

    @contextmanager
    def running(self) -> Iterator[None]:
        previous_profile = sys.getprofile()
        sys.setprofile(self._profile)
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            sys.setprofile(previous_profile)


def _callables() -> list[Any]:
    """Functions and classes of torch, and those by which a pickle calls others."""
    spaces = [torch, torch.nn, torch.utils.data, torch.hub, torch.serialization, torch.jit, dcp, metadata, filesystem]
    named = [value for space in spaces for value in vars(space).values() if callable(value)]
    of_torch = [value for value in named if getattr(value, "__module__", None) and hasattr(value, "__qualname__")]
    return [*of_torch, eval, exec, getattr, setattr, __import__, open]


class Random:
    """Pickles that name, call, change and nest what a reader of metadata may meet."""

    def __init__(self, seed: int, sound: Metadata, callables: list[Any]) -> None:
        self.draw = random.Random(seed)
        self.sound, self.callables = sound, callables

    def pickle(self) -> bytes:
        protocol = self.draw.choice([2, 4, 5])
        while True:
            try:
                return pickle.dumps(self._in_metadata(), protocol)
            except Exception:  # not every function has a name that a pickle takes
                continue

    def _in_metadata(self) -> object:
        """The metadata of a checkpoint with foreign values at some places, or something else."""
        if self.draw.random() < 0.2:
            return self._value(3)
        data = pickle.loads(pickle.dumps(self.sound))
        for _ in range(self.draw.randint(1, 3)):
            part: Any = self.draw.choice([data, *data.storage_data.values(), *data.state_dict_metadata.values()])
            if part is not data and self.draw.random() < 0.1:
                data.state_dict_metadata[self._value(1) if self.draw.random() < 0.5 else "x"] = self._value(3)
                continue
            name = self.draw.choice([*vars(part)])
            vars(part)[name] = self._value(3)
        return data

    def _value(self, depth: int) -> Any:
        kind = self.draw.randrange(9 if depth else 4)
        if kind < 2:
            return self.draw.choice(self.callables)
        if kind < 4:
            return self.draw.choice([0, -1, 2**70, "x", b"x", None, True, 1.5, torch.float16, torch.Size([2]), "../x"])
        inside = [self._value(depth - 1) for _ in range(self.draw.randrange(4))]
        if kind == 4:
            return self.draw.choice([list, tuple])(inside)
        if kind == 5:
            return {str(place): value for place, value in enumerate(inside)}
        if kind == 6:
            return _Built(self.draw.choice(self.callables), inside)
        return Call(self.draw.choice(self.callables), *inside)


class _Built:
    """Pickled, it sets the attributes of a class or function, or calls the ``__setstate__`` of an object."""

    def __init__(self, target: Any, values: list[Any]) -> None:
        self.target, self.values = target, values

    def __reduce__(self) -> tuple[Any, ...]:
        names = ["__init__", "__setstate__", "__reduce__", "fqn", "size", "__class__"]
        state = dict(zip(names, self.values, strict=False))
        return self.target, tuple(self.values[:1]), (None, state) if len(self.values) % 2 else state


def test_pickles_of_torch_functions_run_no_code(folder: Path) -> None:
    """2,000 of them: each is refused, or is metadata of tensors whose files are listed."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(_read_random_pickles, folder).result()


def _read_random_pickles(folder: Path) -> None:
    os.chdir(folder)
    place, sound, callables = folder / "run" / STEP, stored_metadata(folder), _callables()
    files = [file.name for file in place.iterdir()]
    kinds = (Metadata, MetadataIndex, TensorProperties, ChunkStorageMetadata)
    pickle.dumps(sound)  # copyreg notes the slots of each class that is pickled for the first time
    class_attributes = [dict(vars(kind)) for kind in kinds]
    usual, observed = Observed(), Observed()
    for content in (
        (place / FILE).read_bytes(),
        pickle.dumps(eval),
        b"x",
        pickle.dumps(replace(sound, storage_data=1)),
    ):
        (place / FILE).write_bytes(content)
        with usual.running(), suppress(CheckpointError):
            read_metadata(place, files)
    with observed.running():
        pickle.loads(pickle.dumps(Call(eval, "1")))
    assert "exec" in {event for event, _ in observed.events}
    refused, observed = 0, Observed()
    for seed in range(2000):
        (place / FILE).write_bytes(Random(seed, sound, callables).pickle())
        with observed.running():
            try:
                result = read_metadata(place, files)
            except CheckpointError:
                refused += 1
                continue
        assert all(type(entry) is TensorStorageMetadata for entry in result.state_dict_metadata.values())
        assert {info.relative_path for info in result.storage_data.values()} <= {*files}
    assert observed.functions - usual.functions == set()
    assert observed.events - usual.events == set()
    assert 1000 < refused < 2000
    assert [dict(vars(kind)) for kind in kinds] == class_attributes
    assert {file.name for file in place.iterdir()} == {*files}
