"""``pipegraph export``: what it prints, and that torchrun's ranks write one folder together."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from pipegraph.cli import main
from pipegraph.workflows import export
from tests.cli.command import ROOT, Command, program
from tests.equal_work import equal_work_shared

MODEL = ROOT / "tests/models/counting.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package and the checkpoints of a run."""
    folder = tmp_path_factory.mktemp("trained")
    run = ["run", folder / "package", "--model", MODEL, "--nproc", 1, "--kernels", "eager", "--steps", 2]
    for words in (
        ["split", MODEL, "--points", "layers.2", "-o", folder / "package"],
        [*run, "--checkpoint", folder / "run"],
    ):
        with equal_work_shared(), pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        assert ended.value.code == 0
    return folder


def test_it_says_what_it_wrote(pipegraph: Command, trained: Path, tmp_path: Path) -> None:
    arguments = ("export", trained / "run", trained / "package", "-o", tmp_path / "out")
    done = pipegraph(*arguments)
    assert (done.code, done.out) == (0, f"wrote {tmp_path / 'out'}: step-00000002, 1.8 KiB in 1 file\n")
    again = pipegraph(*arguments)
    assert (again.code, again.out) == (2, "")
    assert again.err.startswith(f"error: {tmp_path / 'out'} already holds an export.\nTry: --overwrite to replace it")
    (tmp_path / "out/model-00001-of-00001.safetensors").write_bytes(b"old")
    assert pipegraph(*arguments, "--overwrite").out == done.out
    (tmp_path / "out/notes.txt").write_text("mine")
    files_before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    refused = pipegraph(*arguments, "--overwrite")
    assert refused.code == 2 and "files that export did not write" in refused.err and "\nTry: " in refused.err
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == files_before


def test_a_full_disk_leaves_nothing(
    pipegraph: Command, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export, "write_tensors", full)
    done = pipegraph("export", trained / "run", trained / "package", "-o", tmp_path / "out")
    assert done.code == 2 and "OSError" not in done.err
    assert f"{tmp_path / 'out'} cannot be written: No space left" in done.err and f"disk of {tmp_path}" in done.err
    assert "\nTry: make room there" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # tests/workflows/test_export.py has ranks, without torchrun
def test_ranks_of_torchrun_write_one_folder(trained: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command = ["-m", "pipegraph", "export", trained / "run", trained / "package", "-o", tmp_path / "out", "--json"]
    done = program(*torchrun, *command)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["checkpoint"] == str(trained / "run/step-00000002")
    assert len(result["files"]) > 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*result["files"], "model.safetensors.index.json"}
