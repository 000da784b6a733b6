"""``pipegraph split --check``: is the package what would be written now?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import CHAIN, Command


@pytest.fixture
def package(pipegraph: Command, tmp_path: Path) -> Path:
    assert pipegraph("split", CHAIN, "--points", "layers.2", "-o", tmp_path / "out").code == 0
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nothing_to_say_of_a_package_that_was_just_written(pipegraph: Command, package: Path) -> None:
    done = pipegraph("split", CHAIN, "--points", "layers.2", "--check", "-o", package)
    assert (done.code, done.out, done.err) == (0, f"{package} is as it would be written\n", "")


def test_an_edit_is_shown_as_a_diff_and_left_alone(pipegraph: Command, package: Path) -> None:
    stage = package / "stage_1.py"
    stage.write_text(stage.read_text().replace("return ", "return 2 * "))
    contents_before = contents(package)
    done = pipegraph("split", CHAIN, "--points", "layers.2", "--check", "-o", package)
    assert (done.code, done.err) == (1, "")
    lines = done.out.splitlines()
    assert lines[:2] == [f"--- {stage}", "+++ stage_1.py, as it would be"]
    assert [line.split("return")[0].strip() for line in lines if "return" in line] == ["-", "+"]
    assert contents(package) == contents_before


def test_other_points_change_the_manifest_and_the_stages(pipegraph: Command, package: Path) -> None:
    done = pipegraph("split", CHAIN, "--points", "layers.1,layers.3", "--check", "--json", "-o", package)
    assert done.code == 1
    changes = json.loads(done.out)["changes"]
    assert {"__init__.py", "pipeline.json", "stage_1.py", "stage_2.py"} <= changes.keys()
    assert changes["stage_2.py"].splitlines()[2].startswith("@@ -0,0")


def test_there_must_be_a_package(pipegraph: Command, tmp_path: Path) -> None:
    done = pipegraph("split", CHAIN, "--points", "layers.2", "--check", "-o", tmp_path / "none")
    assert done.code == 2
    assert "holds no package to check" in done.err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--dry-run", "--overwrite"])
def test_it_writes_nothing_anyway(pipegraph: Command, option: str) -> None:
    done = pipegraph("split", CHAIN, "--points", "layers.2", "--check", option)
    assert done.code == 2 and "leave out --dry-run and --overwrite" in " ".join(done.err.split())
