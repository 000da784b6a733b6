"""``pipegraph run --profile``: what it records, says, and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Command, Result, program
from tests.tracing.chrome import read_strictly
from tests.tracing.loops import actions, read

pytest.importorskip("tensorboard", reason="pip install pipegraph[tensorboard]")

EAGER = ("--kernels", "eager", "--microbatches", 2)
AUTOGRAD = ("--kernels", "autograd", "--microbatches", 2)  # whose processes are ready sooner


def recorded(folder: Path) -> Path:
    """The folder of the only run, with a trace for each rank."""
    (run,) = folder.iterdir()
    names = sorted(file.name for file in run.iterdir())
    (digits,) = {name.split(".")[1] for name in names if name.startswith("rank_")}
    traces = [f"rank_{rank:02d}.{digits}.pt.trace.json.gz" for rank in (0, 1)]
    (events,) = run.glob("events.out.tfevents*")
    assert names == [events.name, "figures.json", "pipeline.json", *traces, "run.json", "schedule.csv"]
    return run


def processes(how: str, *run: object) -> Result:
    """Outside of this process, in which torch's profiler may have been without the setting that keeps it quiet."""
    if how == "torchrun":
        return program("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "pipegraph", *run)
    return program("-m", "pipegraph", *run, "--nproc", how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["2", "torchrun"])
def test_every_step_after_the_first_is_recorded(pipegraph: Command, chain: Path, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "my runs"
    done = processes(how, "run", chain, *AUTOGRAD, "--steps", 3, "--profile", folder)
    assert done.code == 0, done.err
    run = recorded(folder)
    assert done.out.split("\n\n")[-1].splitlines() == [
        f"wrote {run}",
        "a trace for each rank; to see it:",
        f"  tensorboard --logdir '{folder}'",
        f"  pipegraph trace report '{folder}'",
    ]
    assert [line.split()[1] for line in done.out.splitlines() if line.startswith("step ")][:3] == ["0", "1", "2"]
    assert "profiler_start" not in done.err
    about = json.loads((run / "run.json").read_text())
    assert about["windows"][0]["steps"] == [1, 2]
    assert (about["processes"], about["kernels"]) == (2, "autograd")
    assert_actions(run)
    assert_readable(pipegraph, run, takes_turns=False)


def assert_actions(run: Path) -> None:
    for rank in (0, 1):
        (trace,) = (read(file) for file in run.glob(f"rank_{rank:02d}.*"))
        spans = [span["name"] for span in actions(trace) if span["args"]["step"] == 2]
        assert {f"F stage {rank} microbatch 1", f"B stage {rank} microbatch 0"} <= set(spans)


def assert_readable(pipegraph: Command, run: Path, takes_turns: bool) -> None:
    report = json.loads(pipegraph("trace", "report", run.parent, "--json").out)
    assert (report["problems"], report["takes_turns"]) == ([], takes_turns)
    assert all(step["complete"] for step in report["steps"])
    assert [bubble["rank"] for bubble in report["bubble"]] == [0, 1]
    assert all(stage["measured"] > 0 for stage in report["stages"])
    file = run.parent / "trace.json.gz"
    merged = json.loads(pipegraph("trace", "merge", run.parent, "-o", file, "--operations", "--json").out)
    read_strictly(file)
    assert (merged["flows"], merged["problems"]) == (4 * len(report["steps"]), [])  # 2 microbatches, there and back
    assert all(clock["error"] is not None for clock in merged["clocks"])


def test_without_steps_three_are_recorded(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    done = pipegraph("run", chain, *EAGER, "--nproc", 1, "--profile", tmp_path, "--json")
    summary = json.loads(done.out)
    run = recorded(tmp_path)
    assert Path(summary["profile"]) == run
    about = json.loads((run / "run.json").read_text())
    assert (about["windows"][0]["steps"], about["processes"]) == ([1, 3], 1)
    assert_actions(run)
    assert_readable(pipegraph, run, takes_turns=True)
    assert [step["index"] for step in summary["steps"]] == [0, 1, 2, 3]
    losses = json.loads((run / "figures.json").read_text())["losses"]
    assert losses == [{"step": step["index"], "loss": step["loss"]} for step in summary["steps"]]
    assert "loss " in pipegraph("trace", "report", run).out
    assert summary["predicted_and_measured"]["measured_steps"] == 3  # who times the actions continues as well


def test_too_few_steps(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    done = pipegraph("run", chain, *EAGER, "--profile", tmp_path, "--steps", 1)
    assert done.code == 2
    assert "1 step is too few" in done.err and "--steps 4" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_folder_that_cannot_be_made_fails_before_the_training(
    pipegraph: Command, chain: Path, tmp_path: Path, nproc: int
) -> None:
    (tmp_path / "file").write_text("no folder")
    done = pipegraph("run", chain, *EAGER, "--nproc", nproc, "--profile", tmp_path / "file" / "runs")
    assert (done.code, done.out) == (2, "")
    assert all(part in done.err for part in (f"{tmp_path}/file/runs", "Not a directory", "\nTry: "))
