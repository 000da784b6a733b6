"""Packages and results that the tests of a session share; the first pytest worker that needs one makes it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.parity.cases import CASES, MODELS
from tests.parity.rank import train_all
from tests.parity.reference import prepare
from tests.parity.training import KERNELS, Report, train
from tests.runtime import ranks

TIMEOUT = 150


class Workshop:
    """A folder with one folder per model (packages and references) and one per number of ranks (what they found)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def package(self, model: str, stages: int) -> Path:
        """The package of one of `MODELS`."""
        return self._model(model) / str(stages)

    def reference(self, case: str) -> dict[str, Any]:
        """What the unsplit model gives."""
        model = CASES[case].model
        reference: dict[str, Any] = torch.load(self._model(model) / f"{case}.pt", mmap=True)
        return reference

    def in_one_process(self, case: str, schedule: str, stages: int, kernels: str = KERNELS) -> list[Report]:
        """What training finds with all stages in this process."""
        return [train(self.package(CASES[case].model, stages), case, schedule, self.reference(case), kernels)]

    def in_processes(self, case: str, stages: int) -> list[Report]:
        """The report of each rank. The first call runs all cases with this number of stages in the same processes."""
        folder = self._once(f"{stages} processes", lambda out: self._run(stages, out))
        return [json.loads((folder / f"{case} {rank}.json").read_text()) for rank in range(stages)]

    def _model(self, name: str) -> Path:
        return self._once(name, lambda folder: prepare(name, folder))

    def _run(self, stages: int, out: Path) -> None:
        for name in MODELS:
            self._model(name)
        results = ranks.run(train_all, stages, self._folder, stages, out, timeout=TIMEOUT)
        if results != ["done"] * stages:
            raise RuntimeError(f"the ranks ended with {results}")

    def _once(self, name: str, make: Callable[[Path], None]) -> Path:
        """The folder `name`, filled by `make`. What `make` raised the first time is raised each time."""
        folder = self._folder / name
        with locked(self._folder / f"{name}.lock"):
            if not folder.exists():
                folder.mkdir()
                try:
                    make(folder)
                except BaseException as error:  # pytest's time limit is no Exception
                    (folder / "error.txt").write_text(traceback.format_exc())
                    if not isinstance(error, Exception):
                        raise
        failure = folder / "error.txt"
        if failure.exists():
            raise RuntimeError(failure.read_text())
        return folder


@contextmanager
def workshop(folder: Path) -> Iterator[Workshop]:
    """A workshop in `folder`, which several processes may share. The last one to leave removes it: it is large."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock, users = folder.with_suffix(".lock"), folder / "users"
    with locked(lock):
        users.mkdir(parents=True, exist_ok=True)
        user_file = users / str(os.getpid())
        user_file.touch()
    try:
        yield Workshop(folder)
    finally:
        with locked(lock):
            user_file.unlink()
            if not any(users.iterdir()):
                shutil.rmtree(folder)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold `file`, against other processes; the system lets it go when a process dies."""
    with file.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield
