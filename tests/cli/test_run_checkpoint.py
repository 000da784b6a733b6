"""``pipegraph run --checkpoint``: a run of processes that continues, ends at SIGTERM, and says why it cannot."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from pipegraph.cli import main
from pipegraph.workflows.run_checkpoints import read_log
from tests.cli.command import ROOT, Command
from tests.equal_work import equal_work_shared
from tests.slow import cases

MODEL = ROOT / "tests/models/counting.py"
OPTIONS = ("--model", MODEL, "--kernels", "eager", "--microbatches", 4)


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of ``tests/models/counting.py`` in two stages."""
    folder = tmp_path_factory.mktemp("counting") / "package"
    with equal_work_shared(), pytest.raises(SystemExit):
        main(["split", str(MODEL), "--points", "layers.2", "-o", str(folder)])
    return folder


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder) if "loss" in line]


@pytest.fixture(scope="module")
def expected_losses(counting: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of 8 steps in one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    words = ["run", counting, *OPTIONS, "--steps", 8, "--nproc", 1, "--checkpoint", folder]
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 0
    return losses(folder)


@pytest.mark.slow  # tests/runtime/test_checkpoint.py has other numbers of processes
def test_processes_save_and_one_process_goes_on(
    pipegraph: Command, counting: Path, expected_losses: list[float], tmp_path: Path
) -> None:
    run, folder = ("run", counting, *OPTIONS, "--checkpoint", tmp_path), tmp_path / "step-00000003"
    first = pipegraph(*run, "--steps", 3)
    assert (first.code, first.err) == (0, "")
    assert folder.is_dir()
    again = pipegraph(*run, "--steps", 8, "--nproc", 1, "--checkpoint-every", 2, "--keep", 2)
    lines = again.out.splitlines()
    assert lines[0] == f"continues from {folder}"
    assert re.match(r"step 3   loss \d\.\d{6}   accuracy 0\.\d+   \d\.\d{3} s", lines[1])
    assert losses(tmp_path) == expected_losses
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "step-00000006", "step-00000008"}
    done = pipegraph(*run, "--steps", 8, "--nproc", 1)
    assert done.out.splitlines() == [
        f"continues from {tmp_path / 'step-00000008'}",
        "8 steps are done, and no more are to do.",
    ]
    document = json.loads(pipegraph(*run, "--steps", 9, "--nproc", 1, "--json").out)
    assert [step["index"] for step in document["steps"]] == [8, 8]  # the second one is the evaluation


@pytest.mark.slow  # tests/runtime/test_checkpoint.py has positions in the data
def test_data_parallel_ranks_share_the_data(
    pipegraph: Command, counting: Path, expected_losses: list[float], tmp_path: Path
) -> None:
    """Each rank's own rows, of the same batches; their order in sums is another one."""
    done = pipegraph("run", counting, *OPTIONS, "--steps", 4, "--dp-replicate", 2, "--checkpoint", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert losses(tmp_path) == pytest.approx(expected_losses[:4], rel=1e-5)


@pytest.mark.slow
def test_ranks_of_a_pipeline_that_read_different_data_are_refused(
    pipegraph: Command, counting: Path, tmp_path: Path
) -> None:
    """Input and target would be of different batches."""
    file = tmp_path / MODEL.name
    unseeded = "import os\n\n\ndef data(rank, world):\n    return [batch(os.getpid() + step) for step in range(9)]\n"
    file.write_text(f"{MODEL.read_text()}\n\n{unseeded}")
    refused = pipegraph("run", counting, "--model", file, "--kernels", "eager", "--microbatches", 4)
    assert (refused.code, refused.out) == (2, "")
    assert "batch 0 of data(0, 1) of counting.py" in refused.err and "all ranks" in refused.err


@pytest.mark.slow  # tests/runtime has ranks that fail, test_sigterm a run that saves and leaves
def test_a_rank_whose_data_fail_is_named_and_all_save(pipegraph: Command, counting: Path, tmp_path: Path) -> None:
    """The other ranks of a mesh have a batch, and end with it before the step begins."""
    file = tmp_path / MODEL.name
    lines = "def data(rank, world):\n    for step in range(9):\n        if step == 2 and rank == 1:\n"
    lines += "            raise OSError('the file is gone')\n        yield batch(step, rank, world)\n"
    file.write_text(f"{MODEL.read_text()}\n\n{lines}")
    options = ("--model", file, "--kernels", "eager", "--microbatches", 2, "--dp-replicate", 2)
    refused = pipegraph("run", counting, *options, "--steps", 9, "--checkpoint", tmp_path / "run")
    assert refused.code == 2
    assert "data(1, 2) of counting.py: batch 2 raised OSError: the file is gone" in refused.err
    assert "saved as step 2" in refused.err
    assert (tmp_path / "run/step-00000002").is_dir()


@pytest.mark.parametrize("processes", cases([1, 2], slow=[2]))
def test_sigterm_saves_and_leaves(
    pipegraph: Command, counting: Path, expected_losses: list[float], tmp_path: Path, processes: int
) -> None:
    command = ["run", counting, *OPTIONS, "--nproc", processes, "--checkpoint", tmp_path / "run"]

    def end(process: int) -> None:
        deadline = time.monotonic() + 60
        while len(read_log(tmp_path / "run")) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process, signal.SIGTERM)

    if processes == 1:
        ending = threading.Thread(target=end, args=(os.getpid(),))
        ending.start()
        done = pipegraph(*command)
        ending.join()
        code, out, err = done.code, done.out, done.err
    else:
        words = [sys.executable, "-m", "pipegraph", *map(str, command)]
        started = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        end(started.pid)
        out, err = started.communicate(timeout=60)
        code = started.returncode
    assert (code, err) == (128 + signal.SIGTERM, "")
    (place,) = (tmp_path / "run").glob("step-*")
    steps = int(place.name[-8:])
    assert f"SIGTERM came: saved after {steps} steps. The same command continues." in out
    assert len(losses(tmp_path / "run")) == steps
    rerun = pipegraph("run", counting, *OPTIONS, "--nproc", 1, "--checkpoint", tmp_path / "run", "--steps", steps + 2)
    assert rerun.code == 0, rerun.err
    run_losses = losses(tmp_path / "run")
    assert run_losses[:8] == pytest.approx(expected_losses[: len(run_losses)], rel=1e-5)
    assert len(run_losses) == steps + 2


@pytest.fixture(scope="module")
def saved_once(counting: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    options = "--nproc", 1, "--steps", 2, "--checkpoint", folder, "--checkpoint-every", 1
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in ("run", counting, *OPTIONS, *options)])
    assert ended.value.code == 0
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """The folder of a run that was saved after 1 and after 2 steps."""
    return shutil.copytree(saved_once, tmp_path / "run")


def go_on(pipegraph: Command, package: Path, folder: Path, *options: object) -> Any:
    return pipegraph("run", package, *OPTIONS, "--nproc", 1, "--checkpoint", folder, "--steps", 3, *options)


def test_what_was_half_written_is_no_checkpoint(pipegraph: Command, counting: Path, saved: Path) -> None:
    """The processes were killed while they wrote the second one."""
    (saved / "step-00000002").rename(saved / ".step-00000002.partial")
    (saved / ".step-00000002.partial/checkpoint.json").unlink()
    done = go_on(pipegraph, counting, saved)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"continues from {saved / 'step-00000001'}\nstep 1   ")
    assert not (saved / ".step-00000002.partial").exists()


@pytest.mark.filterwarnings("always:a checkpoint cannot be used")
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    pipegraph: Command, counting: Path, saved: Path
) -> None:
    def damage(name: str) -> None:
        (file,) = (saved / name).glob("*.distcp")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    damage("step-00000002")
    done = go_on(pipegraph, counting, saved)
    assert done.code == 0
    assert "step-00000002" in done.err and "damaged" in done.err
    assert done.out.startswith(f"continues from {saved / 'step-00000001'}\n")
    for name in ("step-00000001", "step-00000003"):
        damage(name)
    refused = go_on(pipegraph, counting, saved)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(f"error: the run in {saved} cannot continue: no checkpoint in {saved} is whole:")
    assert "--checkpoint with a new folder" in refused.err


def test_a_checkpoint_of_another_model_is_refused(pipegraph: Command, saved: Path, tmp_path: Path) -> None:
    text = MODEL.read_text()
    assert "self.layers" in text
    file = tmp_path / MODEL.name
    file.write_text(text.replace("self.layers", "self.blocks"))
    with equal_work_shared():
        assert pipegraph("split", file, "--points", "blocks.2", "-o", tmp_path / "other").code == 0
    mtimes = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    options = ["--model", file, "--kernels", "eager", "--nproc", 1, "--checkpoint", saved, "--steps", 3]
    refused = pipegraph("run", tmp_path / "other", *options)
    assert (refused.code, refused.out) == (2, "")
    assert "another model" in refused.err
    assert "it lacks blocks.0.0.bias. Did you mean" in refused.err
    assert refused.err.count("Try: ") == 1
    assert mtimes == {path: path.stat().st_mtime_ns for path in saved.rglob("*")}


def test_another_precision_is_named(pipegraph: Command, counting: Path, saved: Path) -> None:
    refused = go_on(pipegraph, counting, saved, "--precision", "bf16-true")
    assert (refused.code, refused.out) == (2, "")
    assert "another dtype" in refused.err
    assert "embed.weight is torch.float32 there, and torch.bfloat16" in refused.err
    assert refused.err.count("Try: ") == 1 and "--precision" in refused.err


def test_a_log_that_cannot_be_written_is_named(pipegraph: Command, counting: Path, tmp_path: Path) -> None:
    """Each write to /dev/full fails as on a full disk."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.log.jsonl.part").symlink_to("/dev/full")
    refused = go_on(pipegraph, counting, tmp_path / "run")
    assert (refused.code, refused.out) == (2, "")
    assert "log.jsonl cannot be written: No space left on device.\nTry: room on that disk" in refused.err


def test_a_full_disk_leaves_what_was_saved(
    pipegraph: Command, counting: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, "write_data", full)
        done = go_on(pipegraph, counting, saved)
    assert done.code == 2
    assert str(saved / "step-00000003") in done.err and "No space left on device" in done.err
    assert "room for the whole model" in done.err
    assert sorted(path.name for path in saved.glob("*step*")) == ["step-00000001", "step-00000002"]
    assert go_on(pipegraph, counting, saved).code == 0


@pytest.mark.parametrize("option", ["--checkpoint-every", "--keep"])
def test_options_of_checkpoints_need_a_folder(pipegraph: Command, counting: Path, option: str) -> None:
    refused = pipegraph("run", counting, option, 3)
    assert refused.code == 2
    assert "Try: --checkpoint DIR too" in refused.err


def test_scalars_of_all_steps_go_to_tensorboard(pipegraph: Command, counting: Path, tmp_path: Path) -> None:
    """Only three steps are traced."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = pipegraph("run", counting, *OPTIONS, "--nproc", 1, "--steps", 6, "--profile", tmp_path)
    assert done.code == 0, done.err
    (folder,) = tmp_path.iterdir()
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("loss")] == list(range(6))
    assert "throughput/tokens_per_second" in accumulator.Tags()["scalars"]
    shutil.rmtree(folder)


@pytest.mark.slow  # `make train` runs it
def test_the_example_learns(pipegraph: Command, tmp_path: Path) -> None:
    """``examples/text``: a few steps of it, and the picture of their curve."""
    model, package = ROOT / "examples/text/model.py", tmp_path / "text"
    with equal_work_shared():
        assert pipegraph("split", model, "--points", "layers.2", "-o", package).code == 0
    options = ["--model", model, "--nproc", 1, "--kernels", "autograd", "--microbatches", 4, "--steps", 4]
    done = pipegraph("run", package, *options, "--checkpoint", tmp_path / "run")
    assert done.code == 0, done.err
    run_losses = losses(tmp_path / "run")
    assert len(run_losses) == 4 and run_losses[-1] < run_losses[0]
    again = shutil.copytree(tmp_path / "run", tmp_path / "again")
    curve = [ROOT / "examples/text/curve.py", tmp_path / "run", again, "-o", tmp_path / "curve.svg"]
    process = subprocess.run([sys.executable, *map(str, curve)], capture_output=True, text=True, check=True)
    assert "again differs from run by at most 0.0e+00" in process.stdout
    assert (tmp_path / "curve.svg").read_text().startswith("<svg ")
