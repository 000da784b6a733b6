"""``pipegraph run``: in one process, in its own processes, under torchrun, and when a rank dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from pipegraph.cli import main
from pipegraph.cost.hardware import Hardware
from pipegraph.package.prediction import UNCORRECTED
from pipegraph.schedule import build, lower, to_csv
from tests.cli.command import ROOT, Command, program
from tests.equal_work import equal_work_shared
from tests.slow import cases

# The kernels of processes that are tested for something else: they take the least time to be ready.
AUTOGRAD = ("--kernels", "autograd")
CHAIN = ROOT / "tests/models/chain.py"
SOURCES = ("measured", "predicted")
KINDS = (("forward",), ("input_grad", "weight_grad"))
NO_HANG_SECONDS = 60.0  # for two processes that import torch, and 10 seconds to stop
STEP = re.compile(r"step (\d+)   loss (\d+\.\d{6})   \d+\.\d{3} s")


FILE = """
import torch
from torch import nn

class Model(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return {"loss": LOSS, "y": y}

model = Model(nn.Linear(4, 4), nn.Linear(4, 3))
example_inputs = (torch.rand(2, 4),)
"""


def losses(out: str) -> list[str]:
    lines = out.partition("\n\n")[0].splitlines()
    matches = [STEP.fullmatch(line) for line in lines]
    assert all(matches), out
    assert [match[1] for match in matches if match] == [str(index) for index in range(len(lines))]
    return [match[2] for match in matches if match]


def test_a_file_without_seed_and_loss(pipegraph: Command, tmp_path: Path) -> None:
    """Two processes have the same example. The loss is the one that the model returns, or a note says what it is."""
    notes = []
    for loss in ("y.square().mean() + 9", "y"):
        file = tmp_path / f"model_{len(notes)}.py"
        file.write_text(FILE.replace("LOSS", loss))
        package = tmp_path / f"package_{len(notes)}"
        assert pipegraph("split", file, "--points", "1", "-o", package).code == 0
        done = pipegraph("run", package, *AUTOGRAD, "--nproc", 2, "--model", file, "--steps", 1)
        assert done.code == 0, done.err
        notes.append("mean square of the outputs" in done.out)
        assert (float(losses(done.out)[0]) > 9) == (loss != "y")
    assert notes == [False, True]


@pytest.mark.slow
def test_one_two_and_torchrun_processes_agree(
    pipegraph: Command, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a working folder that has a file of the name of a module of Python's, which they do not import."""
    monkeypatch.chdir(tmp_path)
    Path("html.py").write_text("raise AssertionError('imported')\n")
    options = [*AUTOGRAD, "--microbatches", 4, "--steps", 2]
    alone = pipegraph("run", chain, "--nproc", 1, *options)
    default_run = pipegraph("run", chain, *options)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    under = program(*torchrun, "-m", "pipegraph", "run", chain, *options, cwd=tmp_path)
    assert (alone.code, default_run.code, under.code) == (0, 0, 0), (alone, default_run, under)
    assert default_run.err == ""
    assert len(losses(alone.out)) == 2
    assert losses(alone.out) == losses(default_run.out) == losses(under.out)


@pytest.mark.slow  # tests/cli/test_joint_plan.py runs another one
def test_a_mesh_trains_as_one_pipeline(pipegraph: Command, chain: Path) -> None:
    """Both data-parallel ranks have the same batch. One process of four prints."""
    options = [*AUTOGRAD, "--microbatches", 4, "--steps", 2]
    alone = pipegraph("run", chain, "--nproc", 1, *options)
    mesh = pipegraph("run", chain, "--dp-shard", 2, "--mesh-order", "dp_shard,pp,dp_replicate,tp", *options)
    assert (mesh.code, mesh.err) == (0, "")
    assert len(losses(mesh.out)) == 2
    assert [float(loss) for loss in losses(mesh.out)] == pytest.approx([float(loss) for loss in losses(alone.out)])


def test_a_file_with_transfers_runs_as_its_schedule_does(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(to_csv(lower(build("gpipe", 2, 4), sharded=[0])))
    plain, file = (
        pipegraph("run", chain, *AUTOGRAD, "--nproc", 1, "--microbatches", 4, "--schedule", schedule)
        for schedule in ("gpipe", tmp_path / "mine.csv")
    )
    assert (plain.code, file.code) == (0, 0), file.err
    assert losses(file.out) == losses(plain.out)


def test_model_gives_inputs_target_and_loss(pipegraph: Command, chain: Path) -> None:
    from tests.models.chain import build_model, example_inputs, example_target, loss_fn

    expected = loss_fn(build_model()(*example_inputs), example_target).item()
    done = pipegraph(
        "run", chain, "--kernels", "eager", "--nproc", 1, "--model", "tests/models/chain.py", "--schedule", "gpipe"
    )
    assert [float(loss) for loss in losses(done.out)] == [pytest.approx(expected, rel=1e-5)]


def test_json(pipegraph: Command, chain: Path) -> None:
    done = pipegraph("run", chain, *AUTOGRAD, "--nproc", 1, "--steps", 2, "--json")
    result = json.loads(done.out)
    assert (result["schema_version"], result["schedule"], result["microbatches"]) == (1, "1f1b", 2)
    assert [step["index"] for step in result["steps"]] == [0, 1]
    comparison = result["predicted_and_measured"]
    assert (comparison["processes"], comparison["measured_steps"], comparison["priced_by"]) == (1, 1, None)
    assert comparison["step"] == {"predicted": None, "measured": pytest.approx(result["steps"][1]["seconds"])}


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same package with predicted times."""
    folder = tmp_path_factory.mktemp("priced") / "package"
    with equal_work_shared(), pytest.raises(SystemExit):
        main(["split", str(CHAIN), "--points", "layers.2", "--balance", "time", "-o", str(folder)])
    return folder


def cells(out: str) -> list[list[str]]:
    """The cells of the lines of all tables."""
    return [re.split(" {2,}", line.strip()) for line in out.splitlines()]


def microseconds(cell: str, unit: str) -> float:
    """A time of a table in `unit`, or in its own: times that are too short for the unit of the table have one."""
    number, _, own_unit = cell.partition(" ")
    return float(number) * {"µs": 1.0, "ms": 1e3, "s": 1e6}[own_unit or unit]


@pytest.mark.parametrize(("nproc", "schedule"), cases([(1, "1f1b"), (2, "zb-h1")], slow=[(2, "zb-h1")]))
def test_predicted_and_measured(pipegraph: Command, priced: Path, nproc: int, schedule: str) -> None:
    options = ("--kernels", "eager", "--steps", 3, "--microbatches", 4, "--schedule", schedule)
    done = pipegraph("run", priced, "--nproc", nproc, *options)
    assert (done.code, done.err, len(losses(done.out))) == (0, "", 3)
    assert "predicted (time on cpu); measured: medians of 2 steps, without the first" in done.out
    lines = cells(done.out.partition("\n\n")[2])
    stages = json.loads((priced / "pipeline.json").read_text())["stages"]
    kinds = ["F", "B"] if schedule == "1f1b" else ["F", "I", "W"]
    headers = [header for kind in kinds for header in (f"{kind} predicted", "measured", "error")]
    assert ["stage", "rank", *headers] in lines
    unit = re.search(r"times of stages in (\S+)", done.out)[1]
    for rank in (0, 1):
        row = next(line for line in lines if line[:2] == [str(rank)] * 2)
        assert microseconds(row[2], unit) == pytest.approx(stages[rank]["cost"]["forward"] * 1e6, abs=0.06)
        assert 1 < microseconds(row[3], unit) < 1e5
    (step,) = (line for line in lines if line[0].startswith("step"))
    assert step[0] == ("step, 2 ranks in turn" if nproc == 1 else "step")
    assert any(line[0] == "bubble" for line in lines) == (nproc == 2)
    # Of 4 B each: weights and biases of (8 × 8 + 8) × 2 and 8 × 2 + 2 more, with gradients and two moments.
    memory = {line[0]: line[1:] for line in lines}
    assert memory["memory"] == [f"rank {rank} {kind}" for rank in (0, 1) for kind in ("predicted", "measured")]
    assert memory["parameters"] == memory["gradients"] == ["576 B", "576 B", "648 B", "648 B"]
    assert memory["optimizer state"] == ["1.1 KiB", "1.1 KiB", "1.3 KiB", "1.3 KiB"]
    assert done.out.splitlines()[-2:] == [
        f"The plan was 1f1b with 8 microbatches on 2 ranks, and this was {schedule} with 4 microbatches on 2 ranks. "
        "Try: without --schedule, --microbatches and --nproc",
        "Times and bytes were predicted for compiled kernels, and this run used --kernels eager.",
    ]


def test_saved_bytes_are_those_predicted(pipegraph: Command, priced: Path) -> None:
    done = pipegraph("run", priced, "--kernels", "eager", "--microbatches", 6, "--nproc", 1, "--json")
    table = json.loads(done.out)["predicted_and_measured"]
    assert (
        table["hints"][-1] == "Times and bytes were predicted for compiled kernels, and this run used --kernels eager."
    )
    memory = table["memory"]
    assert [rank["activations"]["measured"] for rank in memory] == [rank["activations"]["predicted"] for rank in memory]


def test_a_single_step_has_no_times(pipegraph: Command, chain: Path) -> None:
    done = pipegraph("run", chain, *AUTOGRAD, "--nproc", 1)
    assert len(losses(done.out)) == 1
    assert done.out.splitlines()[2] == "nothing was predicted; memory as measured"
    assert done.out.splitlines()[-2:] == [
        "Times are measured from the second step on, because the first one compiles. Try: --steps 5",
        "The package has no predicted times. Try: pipegraph split … --balance time",
    ]


@pytest.mark.slow  # tests/workflows has what it computes
def test_recalibrate(pipegraph: Command, priced: Path, tmp_path: Path) -> None:
    """With compiled kernels. The profile then predicts what was measured."""
    file = tmp_path / "mine.json"
    options = ("--nproc", 1, "--steps", 4, "--microbatches", 8, "--learning-rate", 0)
    done = pipegraph("run", priced, *options, "--recalibrate", file, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    section = result["predicted_and_measured"]["stages"]
    measured, predicted = ([sum(stage[kind][source] for stage in section) for kind in "FB"] for source in SOURCES)
    corrected = Hardware.load(file)
    ratio = corrected.measured_ratio
    section = result["recalibrated"]
    assert (section["file"], section["measured_ratio"]) == (str(file), structs.asdict(ratio))
    assert isinstance(section["uneven"], list)
    assert corrected.name == "mine"
    expected = [actual / prediction for actual, prediction in zip(measured, predicted, strict=True)]
    assert [ratio.forward, ratio.input_grad] == pytest.approx(expected, rel=1e-3)
    figures = structs.replace(corrected, name="cpu", measured_ratio=UNCORRECTED, sources={})
    assert figures == structs.replace(Hardware.load("cpu"), sources={})
    again = tmp_path / "again"
    split = pipegraph("split", CHAIN, "--points", "layers.2", "--balance", "time", "--hardware", file, "-o", again)
    assert split.code == 0, split.err
    costs = [stage["cost"] for stage in json.loads((again / "pipeline.json").read_text())["stages"]]
    forward, backward = (sum(sum(cost[kind] for kind in kinds) for cost in costs) for kinds in KINDS)
    assert [forward, backward] == pytest.approx(measured, rel=0.02)
    done = pipegraph("run", again, *options, "--recalibrate", tmp_path / "third.json")
    assert re.search(r"^wrote .*third\.json: F × [\d.]+, I × [\d.]+, W × [\d.]+$", done.out, re.MULTILINE), done


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kernels", "eager", "--steps", 3), "eager kernels cannot correct it"),
        (("--precision", "bf16", "--steps", 3), "a run in bf16 cannot correct it"),
        (("--precision", "fp32", "--steps", 3), "No profile predicted this package's times"),
        (("--steps", 1), "Try: --steps 5"),
        (("--steps", 3), "No profile predicted this package's times"),
        (("--steps", 3, "--hardware", "h1000"), 'No hardware profile is called "h1000". Did you mean "h100"?'),
    ],
)
def test_no_recalibration(
    pipegraph: Command, chain: Path, tmp_path: Path, options: Sequence[object], said: str
) -> None:
    file = tmp_path / "mine.json"
    done = pipegraph("run", chain, *options, "--recalibrate", file)
    assert (done.code, done.out) == (2, "")
    assert said in " ".join(done.err.split())
    assert not file.exists()


def test_another_file_than_a_profile_is_left_alone(pipegraph: Command, priced: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim.py"
    victim.write_text("precious = 1\n")
    done = pipegraph("run", priced, "--steps", 3, "--hardware", "cpu", "--recalibrate", victim)
    assert (done.code, done.out) == (2, "")
    assert "not overwritten" in " ".join(done.err.split())
    assert victim.read_text() == "precious = 1\n"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("README.md/mine.json", "README.md is a file, not a folder"),
        ("tests", "tests cannot be written: it is not a regular"),
    ],
)
def test_a_profile_that_cannot_be_written(pipegraph: Command, priced: Path, file: str, said: str) -> None:
    done = pipegraph("run", priced, "--steps", 3, "--recalibrate", file)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", (), "rank 1: the process was killed by SIGKILL"),
        pytest.param("import os; os._exit(7)", (), "rank 1: the process exited with code 7", marks=pytest.mark.slow),
        pytest.param("raise ValueError('no bricks left')", ("--debug",), "no bricks left", marks=pytest.mark.slow),
    ],
    ids=["killed", "exited", "raised"],
)
def test_a_rank_that_dies_is_named_and_stops_the_others(
    pipegraph: Command, chain: Path, tmp_path: Path, line: str, options: tuple[str, ...], said: str
) -> None:
    broken = Path(shutil.copytree(chain, tmp_path / "broken"))
    stage = broken / "stage_1.py"
    # Break the forward's first line, not the import: the ranks are connected by then.
    text = re.sub(r"(    def forward\(.*\n)", rf"\1        {line}\n", stage.read_text(), count=1)
    stage.write_text(text)
    start = time.monotonic()
    done = pipegraph("run", broken, *AUTOGRAD, "--steps", 3, *options)
    assert time.monotonic() - start < NO_HANG_SECONDS
    assert (done.code, done.out) == (4, "")
    assert ("Traceback" in done.err) == bool(options)
    assert re.search("^error: rank 1", done.err, re.MULTILINE)
    assert said in done.err
    assert _processes_that_name(broken) == []


@pytest.mark.slow  # tests/runtime/test_faults.py has ranks that hang, too
def test_a_rank_that_hangs_is_named_and_ended(
    pipegraph: Command, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipegraph.runtime.processes.launch._STOP_SECONDS", 1.0)
    broken = Path(shutil.copytree(chain, tmp_path / "broken"))
    stage = broken / "stage_1.py"
    line = "import os; os.kill(os.getpid(), 19)  # SIGSTOP"
    stage.write_text(re.sub(r"(    def forward\(.*\n)", rf"\1        {line}\n", stage.read_text(), count=1))
    start = time.monotonic()
    done = pipegraph("run", broken, *AUTOGRAD, "--timeout", 8)
    assert time.monotonic() - start < NO_HANG_SECONDS
    assert (done.code, done.out) == (4, "")
    assert done.err.startswith(
        "error: rank 0 stopped in stage 0, action 0B0, microbatch 0, waiting for rank 1: rank 0 "
    )
    assert "no answer within 8 s" in done.err
    assert "No word from rank 1: it hangs" in done.err
    assert _processes_that_name(broken) == []


@pytest.mark.filterwarnings("ignore:Stage1 cannot be traced")
def test_what_is_left_to_autograd_is_said_at_the_end_and_refused_if_strict(
    pipegraph: Command, chain: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(chain, tmp_path / "broken"))
    stage = broken / "stage_1.py"
    stage.write_text(
        re.sub(r"(    def forward\(self, (\w+).*\n)", r"\1        \2.sum().item()\n", stage.read_text(), count=1)
    )
    options = ("run", broken, "--nproc", 1, "--kernels", "eager")
    done = pipegraph(*options)
    assert done.code == 0, done.err
    assert "\nNot all is compiled:\n  Stage0 (stage 0): 1 static, 0 symbolic\n  Stage1 (stage 1): " in done.out
    assert "1 left to autograd (a number is taken out of a tensor, " in done.out
    assert "stage_1.py:" in done.out
    done = pipegraph(*options, "--strict")
    assert done.code == 4
    assert "Stage1 cannot be traced and is left to autograd" in done.err


def test_training_lowers_the_loss(pipegraph: Command, chain: Path) -> None:
    first, second, third = map(
        float, losses(pipegraph("run", chain, "--kernels", "eager", "--nproc", 1, "--steps", 3).out)
    )
    assert first > second > third


def test_a_learning_rate_of_zero_leaves_the_weights(pipegraph: Command, chain: Path) -> None:
    first, second, third = losses(
        pipegraph("run", chain, *AUTOGRAD, "--nproc", 1, "--steps", 3, "--learning-rate", 0).out
    )
    assert first == second == third


@pytest.mark.slow  # tests/runtime/test_launch.py has the refusal
def test_wrong_world_of_torchrun(chain: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3]
    done = program(*torchrun, "-m", "pipegraph", "run", chain, *AUTOGRAD)
    assert done.code != 0
    assert "3 processes cannot run 2 stages" in done.err
    assert 'File "' not in done.err.split("error: ")[1].split("\n")[0]


def _processes_that_name(folder: Path) -> list[str]:
    """Command lines of living processes that hold ``folder``."""
    commands = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_text()
        except OSError:
            continue  # it has ended
        if str(folder) in command and process.parent.name != str(os.getpid()):
            commands.append(command)
    return commands


def test_the_program_is_python_m_pipegraph() -> None:
    done = program("-m", "pipegraph", "--help", cwd=ROOT)
    assert done.code == 0
    assert "Usage: pipegraph" in done.out
