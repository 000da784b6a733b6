"""The wheel works by itself, outside the checkout: templates and hardware profiles have to be in it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MODEL = """
import torch
from torch import nn

def build_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

example_inputs = (torch.ones(2, 4),)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Without isolation hatchling is the one installed for the tests, and nothing is downloaded.
    _run("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(folder), str(ROOT), cwd=folder)
    (built,) = folder.glob("pipegraph-*.whl")
    return built


def test_wheel_holds_the_package_and_its_data_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"pipegraph"}
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "codegen_templates").rglob("*.jinja")}
    assert templates
    assert {f"pipegraph/{name}" for name in templates} <= set(names)
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pipegraph").rglob("*.json")}
    assert {"pipegraph/cost/profiles/h100.json"} <= data <= set(names)
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pipegraph/report/pages").glob("*.*")}
    assert "pipegraph/report/pages/trace.html.jinja" in pages <= set(names)
    assert "pipegraph/py.typed" in names


@pytest.mark.slow
def test_installed_wheel_splits_a_model(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    _run("-m", "pip", "install", "--no-deps", "--quiet", "--target", str(site), str(wheel), cwd=tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    # -P keeps the working folder off the path; the checkout must not be found another way either.
    start = f"import sys; sys.path.insert(0, {str(site)!r}); import pipegraph.cli as cli; print(cli.__file__)"
    where = _run("-P", "-c", start, cwd=tmp_path)
    assert where.strip().startswith(str(site))
    split = f"{start}; cli.main(['split', 'model.py', '--points', '2', '-o', 'out'])"
    printed = _run("-P", "-c", split, cwd=tmp_path)
    assert "stage 1: 2 – 3" in printed
    _run("-P", "-c", "import out; assert out.NUM_STAGES == 2; out.load_stage(1)", cwd=tmp_path, path=tmp_path)


def _run(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
