"""What a newcomer types first."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_make_alone_lists_what_can_be_done() -> None:
    done = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, check=True)
    targets = [line.split()[1] for line in done.stdout.splitlines()]
    assert targets == [
        "help",
        "setup",
        "demo",
        "train",
        "train-killed",
        "test",
        "test-all",
        "lint",
        "format",
        "docs",
        "pictures",
        "survey",
        "clean",
    ]
    assert all(len(line.split(None, 2)) == 3 for line in done.stdout.splitlines())


def test_every_dependency_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(name for extra in extras.values() for name in extra)]
    names = {re.split(r"[><=\[]", requirement)[0].lower() for requirement in requirements} - {"pipegraph"}
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert names <= {name.lower() for name in pinned}


def test_another_torch_has_an_environment_of_its_own() -> None:
    pinned = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for version, folder in ((pinned[0], ".venv"), ("2.11.0", ".venv-torch-2.11.0")):
        command = ["make", "--always-make", "--dry-run", "--no-print-directory", "test", f"TORCH={version}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert f'{folder}/bin/python -m pip install --quiet "torch=={version}"' in done.stdout
        assert f"{folder}/bin/python -m pytest" in done.stdout.splitlines()[-1]
