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
    assert targets == ["help", "setup", "demo", "test", "lint", "format", "clean"]
    assert all(len(line.split(None, 2)) == 3 for line in done.stdout.splitlines())


def test_every_dependency_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["hf"], *extras["tensorboard"], *extras["test"]]
    names = {re.split(r"[><=\[]", requirement)[0].lower() for requirement in asked} - {"pipegraph"}
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert names <= {name.lower() for name in pinned}
