"""``pipegraph export``: what it prints, and that torchrun's ranks write one folder together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipegraph.cli import main
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
    assert again.err == f"error: {tmp_path / 'out'} holds files, which are left alone.\nTry: -o with a new folder.\n"


@pytest.mark.slow  # tests/workflows/test_export.py has ranks, without torchrun
def test_ranks_of_torchrun_write_one_folder(trained: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command = ["-m", "pipegraph", "export", trained / "run", trained / "package", "-o", tmp_path / "out", "--json"]
    done = program(*torchrun, *command)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["checkpoint"] == str(trained / "run/step-00000002")
    assert len(result["files"]) > 1
    assert {each.name for each in (tmp_path / "out").iterdir()} == {*result["files"], "model.safetensors.index.json"}
