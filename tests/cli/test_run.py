"""``pipegraph run``: in one process, in its own processes, under torchrun, and when a rank dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.cli.command import ROOT, Command, program

# The kernels of processes that are tested for something else: they take the least time to be ready.
AUTOGRAD = ("--kernels", "autograd")
STEP = re.compile(r"step (\d+)   loss (\d+\.\d{6})   \d+\.\d{3} s")


def losses(out: str) -> list[str]:
    lines = out.splitlines()
    found = [STEP.fullmatch(line) for line in lines]
    assert all(found), out
    assert [match[1] for match in found if match] == [str(index) for index in range(len(lines))]
    return [match[2] for match in found if match]


def test_one_two_and_torchrun_processes_agree(pipegraph: Command, chain: Path) -> None:
    options = [*AUTOGRAD, "--microbatches", 4, "--steps", 2]
    alone = pipegraph("run", chain, "--nproc", 1, *options)
    own = pipegraph("run", chain, *options)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    under = program(*torchrun, "-m", "pipegraph", "run", chain, *options)
    assert (alone.code, own.code, under.code) == (0, 0, 0), (alone, own, under)
    assert own.err == ""
    assert len(losses(alone.out)) == 2
    assert losses(alone.out) == losses(own.out) == losses(under.out)


def test_model_gives_inputs_target_and_loss(pipegraph: Command, chain: Path) -> None:
    from tests.models.chain import build_model, example_inputs, example_target, loss_fn

    expected = loss_fn(build_model()(*example_inputs), example_target).item()
    done = pipegraph(
        "run", chain, "--kernels", "eager", "--nproc", 1, "--model", "tests/models/chain.py", "--schedule", "gpipe"
    )
    assert [float(loss) for loss in losses(done.out)] == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("nproc", [1, 2])
def test_json_is_printed_once(pipegraph: Command, chain: Path, nproc: int) -> None:
    done = pipegraph("run", chain, *AUTOGRAD, "--nproc", nproc, "--steps", 2, "--json")
    result = json.loads(done.out)
    assert (result["schema_version"], result["schedule"], result["microbatches"]) == (1, "1f1b", 2)
    assert [step["index"] for step in result["steps"]] == [0, 1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "rank 1: the process was killed by SIGKILL"),
        ("import os; os._exit(7)", "rank 1: the process exited with code 7"),
        ("raise ValueError('no bricks left')", "no bricks left"),
    ],
    ids=["killed", "exited", "raised"],
)
def test_a_rank_that_dies_is_named_and_stops_the_others(
    pipegraph: Command, chain: Path, tmp_path: Path, line: str, said: str
) -> None:
    broken = Path(shutil.copytree(chain, tmp_path / "broken"))
    stage = broken / "stage_1.py"
    # Break the forward's first line, not the import: the ranks are connected by then.
    text = re.sub(r"(    def forward\(.*\n)", rf"\1        {line}\n", stage.read_text(), count=1)
    stage.write_text(text)
    start = time.monotonic()
    done = pipegraph("run", broken, *AUTOGRAD, "--steps", 3)
    assert time.monotonic() - start < 30  # two processes that import torch, and 10 seconds to stop
    assert (done.code, done.out) == (4, "")
    assert "Traceback" not in done.err
    assert done.err.startswith("error: rank 1")
    assert said in done.err
    assert _processes_that_name(broken) == []
    if line.startswith("raise"):
        assert "Traceback" in pipegraph("run", broken, *AUTOGRAD, "--debug").err


def test_a_rank_that_hangs_is_named_and_ended(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(chain, tmp_path / "broken"))
    stage = broken / "stage_1.py"
    line = "import os; os.kill(os.getpid(), 19)  # SIGSTOP"
    stage.write_text(re.sub(r"(    def forward\(.*\n)", rf"\1        {line}\n", stage.read_text(), count=1))
    start = time.monotonic()
    done = pipegraph("run", broken, *AUTOGRAD, "--timeout", 8)
    assert time.monotonic() - start < 50  # two processes that import torch, the timeout, and 10 seconds to stop
    assert (done.code, done.out) == (4, "")
    assert done.err.startswith(
        "error: rank 0 stopped in stage 0, action 0B0, microbatch 0, waiting for rank 1: rank 0 "
    )
    assert "no answer within 8 s" in done.err
    assert "No word from rank 1: it hangs" in done.err
    assert _processes_that_name(broken) == []


def test_training_lowers_the_loss(pipegraph: Command, chain: Path) -> None:
    first, second, third = map(
        float, losses(pipegraph("run", chain, "--kernels", "eager", "--nproc", 1, "--steps", 3).out)
    )
    assert first > second > third


def test_a_learning_rate_of_zero_leaves_the_weights(pipegraph: Command, chain: Path) -> None:
    first, second, third = losses(pipegraph("run", chain, *AUTOGRAD, "--steps", 3, "--learning-rate", 0).out)
    assert first == second == third


def test_wrong_world_of_torchrun(chain: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3]
    done = program(*torchrun, "-m", "pipegraph", "run", chain, *AUTOGRAD)
    assert done.code != 0
    assert "3 processes cannot run 2 stages" in done.err
    assert 'File "' not in done.err.split("error: ")[1].split("\n")[0]


def _processes_that_name(folder: Path) -> list[str]:
    """Command lines of living processes that hold ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_text()
        except OSError:
            continue  # it has ended
        if str(folder) in command and process.parent.name != str(os.getpid()):
            found.append(command)
    return found


def test_the_program_is_python_m_pipegraph() -> None:
    done = program("-m", "pipegraph", "--help", cwd=ROOT)
    assert done.code == 0
    assert "Usage: pipegraph" in done.out
