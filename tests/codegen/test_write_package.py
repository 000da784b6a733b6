"""``write_package`` leaves a whole package, or what was there before."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipegraph
from pipegraph.codegen import package_writer
from pipegraph.errors import PackageError
from pipegraph.package import Package
from pipegraph.planner.plan import Plan
from tests.codegen.layers import Block, Row, batch
from tests.codegen.parity import plan_of

# None in sys.modules makes an import fail, even if the module is installed.
STANDALONE = """
import sys

sys.modules.update(dict.fromkeys(["pipegraph", "jinja2", "typer", "rich", "transformers"]))
sys.path += {libraries!r}
sys.path.insert(0, {parent!r})
import torch

import package

x = torch.load({inputs!r})
for index in range(package.NUM_STAGES):
    x = package.load_stage(index)(x)
print(x.sum().item())
"""


@pytest.fixture
def plan() -> Plan:
    torch.manual_seed(0)
    return plan_of(Row([Block() for _ in range(4)]), (batch(),))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_it_runs_without_pipegraph(plan: Plan, tmp_path: Path) -> None:
    """In a process that can import torch and safetensors, and nothing else of what pipegraph needs."""
    package = pipegraph.write_package(plan, tmp_path / "package")
    torch.save(batch(), tmp_path / "x.pt")
    libraries = [str(Path(torch.__file__).parents[1])]
    code = STANDALONE.format(parent=str(tmp_path), inputs=str(tmp_path / "x.pt"), libraries=libraries)
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    expected = package.load_stage(1)(package.load_stage(0)(batch())).sum().item()
    assert float(done.stdout) == pytest.approx(expected, rel=1e-6)


def test_what_is_written(plan: Plan, tmp_path: Path) -> None:
    package = pipegraph.write_package(plan, tmp_path / "deep" / "out")
    assert package.edited() == ()
    assert sorted(contents(package.path)) == [
        "__init__.py",
        "blocks.py",
        "model.safetensors.index.json",
        "pipeline.json",
        "stage-00000-of-00002.safetensors",
        "stage-00001-of-00002.safetensors",
        "stage_0.py",
        "stage_1.py",
        "weights.py",
    ]
    assert (package.path.stat().st_mode & 0o777) == 0o755
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["out"]


def test_twice_gives_the_same_bytes(plan: Plan, tmp_path: Path) -> None:
    first = contents(pipegraph.write_package(plan, tmp_path / "one").path)
    again = plan_of(Row([Block() for _ in range(4)]), (batch(),))
    second = contents(pipegraph.write_package(again, tmp_path / "two", weights=False).path)
    assert first == contents(pipegraph.write_package(plan, tmp_path / "three").path)
    assert {name for name in first if first[name] != second.get(name)} == {
        "model.safetensors.index.json",
        "pipeline.json",
        "stage-00000-of-00002.safetensors",
        "stage-00001-of-00002.safetensors",
    }


@pytest.mark.parametrize("fails", ["write_weights", "generate", "shard_plan"])
@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_what_was_there(
    fails: str, there: bool, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        pipegraph.write_package(plan, tmp_path / "out")
    contents_before = contents(tmp_path)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(package_writer, fails, fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        pipegraph.write_package(plan, tmp_path / "out", overwrite=True)
    assert contents(tmp_path) == contents_before
    assert [entry.name for entry in tmp_path.iterdir()] == (["out"] if there else [])


@pytest.mark.parametrize("limit", [100, 100_000])  # of the source, and of a shard
@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_what_was_there(limit: int, there: bool, tmp_path: Path) -> None:
    """A process that may write no larger files is told the same as one whose disk is full."""
    plan = plan_of(nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 8)), (batch(),), cut="1")
    if there:
        pipegraph.write_package(plan, tmp_path / "out")
    contents_before = contents(tmp_path)
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        with pytest.raises(PackageError) as error:
            pipegraph.write_package(plan, tmp_path / "out", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    message = (
        rf"{tmp_path}/out cannot be written: File too large. The disk of {tmp_path} has .* free of .*\.\nTry: make room"
    )
    assert re.match(message, str(error.value))
    assert contents(tmp_path) == contents_before
    assert [entry.name for entry in tmp_path.iterdir()] == (["out"] if there else [])


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_writers_at_once_the_last_one_stays(
    overwrite: bool, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it may replace the other one's package, which it was not there to see when it began."""
    second = plan_of(Row([Block() for _ in range(4)]), (batch(),), cut=4)
    monkeypatch.setattr(package_writer, "write_weights", twice := Twice(package_writer.write_weights, second, tmp_path))
    if overwrite:
        assert len(pipegraph.write_package(plan, tmp_path / "out", overwrite=True).manifest.stages) == 2
    else:
        with pytest.raises(PackageError, match=r"out already holds a package.\nTry: overwrite=True"):
            pipegraph.write_package(plan, tmp_path / "out")
    assert twice.written is not None
    assert len(Package.open(tmp_path / "out").manifest.stages) == (2 if overwrite else 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


class Twice:
    """Writes weights, after another package has been written to the same place."""

    def __init__(self, write: Callable[..., None], plan: Plan, folder: Path) -> None:
        self.write, self.other, self.folder = write, plan, folder
        self.written: Package | None = None
        self.has_begun = False

    def __call__(self, *args: Any) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.written = pipegraph.write_package(self.other, self.folder / "out")
        self.write(*args)


def test_a_reader_never_gets_parts_of_two_packages(plan: Plan, tmp_path: Path) -> None:
    old_package = pipegraph.write_package(plan, tmp_path / "out")
    old_package.load_stage(0)
    new_package = pipegraph.write_package(plan, tmp_path / "out", overwrite=True)
    for read in (lambda: old_package.load_stage(1), lambda: old_package.check_weights([0])):
        with pytest.raises(
            PackageError, match=r"out was replaced by another package while it was read.\nTry: the same"
        ):
            read()
    new_package.load_stage(1)


def test_a_link_to_a_package_stays(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    pipegraph.write_package(plan, tmp_path / "out")
    pipegraph.write_package(plan, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").readlink() == tmp_path / "out"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "out"]


def test_an_empty_folder_may_be_there(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert pipegraph.write_package(plan, tmp_path / "out").manifest.stages[1].index == 1


def test_a_package_is_replaced_only_when_asked(plan: Plan, tmp_path: Path) -> None:
    package = pipegraph.write_package(plan, tmp_path / "out")
    with pytest.raises(
        PackageError, match=r"out already holds a package.\nTry: overwrite=True to replace it, or out with"
    ):
        pipegraph.write_package(plan, tmp_path / "out")
    package.load_stage(0)  # makes no __pycache__, which would count as a file of the user
    (package.path / "stage_1.py").write_text("# mine\n")
    with pytest.raises(
        PackageError, match=r"already holds a package whose stage_1.py was edited by hand.\nTry: overwrite=True"
    ):
        pipegraph.write_package(plan, tmp_path / "out")
    assert pipegraph.write_package(plan, tmp_path / "out", overwrite=True).edited() == ()


def test_fewer_stages_leave_no_old_file(plan: Plan, tmp_path: Path) -> None:
    pipegraph.write_package(plan_of(Row([Block() for _ in range(4)]), (batch(),), cut=4), tmp_path / "out")
    package = pipegraph.write_package(plan, tmp_path / "out", overwrite=True)
    assert not (package.path / "stage_3.py").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_files_are_never_touched(overwrite: bool, plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(
        PackageError, match=r"holds files that pipegraph did not write \(notes.txt\); it is left alone."
    ):
        pipegraph.write_package(plan, tmp_path / "out", overwrite=overwrite)
    assert contents(tmp_path) == {"out/notes.txt": b"mine"}


def test_other_files_in_a_package_are_never_touched(plan: Plan, tmp_path: Path) -> None:
    package = pipegraph.write_package(plan, tmp_path / "out")
    (package.path / "results").mkdir()
    with pytest.raises(PackageError, match=r"did not write \(results\)"):
        pipegraph.write_package(plan, tmp_path / "out", overwrite=True)


def test_a_file_is_no_folder(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(PackageError, match=r"out is a file.\nTry: out with another folder."):
        pipegraph.write_package(plan, tmp_path / "out", overwrite=True)


def test_a_package_can_be_edited(plan: Plan, tmp_path: Path) -> None:
    """What runs is what the source says."""
    package = pipegraph.write_package(plan, tmp_path / "out")
    output = package.load_stage(0)(batch())
    stage = package.path / "stage_0.py"
    stage.write_text(stage.read_text().replace("return x", "return x * 3"))
    again = Package.open(package.path)
    assert again.edited() == ("stage_0.py",)
    assert torch.allclose(again.load_stage(0)(batch()), output * 3)


def test_an_operation_of_an_unknown_library_is_refused(tmp_path: Path) -> None:
    library = torch.library.Library("nowhere_to_be_found", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    try:

        class Custom(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = Block(), Block()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.b(torch.ops.nowhere_to_be_found.twice(self.a(x).detach()))

        with pytest.raises(pipegraph.CaptureError, match="nowhere_to_be_found"):
            pipegraph.write_package(plan_of(Custom(), (batch(),), cut="b"), tmp_path / "out")
    finally:
        library._destroy()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [".", ""])
def test_the_working_folder_is_not_replaced(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever works there would stand in a folder that is gone."""
    inside = tmp_path / "above" / "inside"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    with pytest.raises(PackageError, match=r"works in it\.\nTry: out "):
        package_writer.require_writable(Path(name), overwrite=True)
    package_writer.require_writable(Path("package"), overwrite=False)
    package_writer.require_writable(Path("../beside"), overwrite=False)
