"""Schedules need no torch, and come out the same in every process."""

import os
import subprocess
import sys

import pipegraph.schedule


def run(code: str, seed: str = "0") -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_import_does_not_load_torch() -> None:
    code = "import sys, pipegraph.schedule as s; s.check(s.lower(s.build('1f1b', 2, 2))); print('torch' in sys.modules)"
    assert run(code) == "False\n"


def test_lowering_does_not_depend_on_the_hash_seed() -> None:
    code = "import pipegraph.schedule as s; print(s.lower(s.build('1f1b', 4, 5), [(0, 1), (1, 2), (2, 3), (0, 3)]))"
    assert run(code, seed="1") == run(code, seed="2")


def test_all_is_complete() -> None:
    public = {
        name
        for name, value in vars(pipegraph.schedule).items()
        if not name.startswith("_") and hasattr(value, "__doc__")
    }
    modules = {name for name in public if type(getattr(pipegraph.schedule, name)) is type(sys)}
    assert public - modules - {"annotations"} == set(pipegraph.schedule.__all__)
