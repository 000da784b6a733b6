"""The plan for a cluster, from ``plan --devices`` to a run: each command takes what the one before wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipegraph.package import Package
from pipegraph.workflows.batch import planned_rows
from tests.cli.command import Command

MODEL = """
import torch
from tests.cli.test_joint_plan import Layer

def build_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer() for _ in range(4)))

generator = torch.Generator().manual_seed(1)
example_inputs = (torch.randn(2, 32, 32, generator=generator),)
example_target = torch.randn(2, 32, 32, generator=generator)
loss_fn = torch.nn.functional.mse_loss
"""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("joint") / "model.py"
    file.write_text(MODEL)
    return file


@pytest.fixture
def package(model: Path, pipegraph: Command) -> Path:
    """In two replicas of a pipeline of two ranks, by the plan of four devices."""
    folder = model.parent / "package"
    if not folder.exists():
        plan = model.parent / "plan.json"
        planning = pipegraph("plan", model, "--devices", 4, "--global-batch", 32, "--schedule", "1f1b", "-o", plan)
        assert planning.code == 0, planning.err
        split = pipegraph("split", model, "--plan", plan, "-o", folder)
        assert split.code == 0, split.err
        assert "on pp 2 × dp_" in split.out and "on pp 2 × dp_" in planning.out
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_takes_the_plan_as_it_is(model: Path, package: Path, pipegraph: Command) -> None:
    """The mesh, the schedule and the rows: the loss is that of the unsplit model on the planned batch."""
    manifest = Package.open(package).manifest
    plan, rows = manifest.prediction, planned_rows(manifest)
    assert plan is not None and rows is not None
    copies = plan.mesh["dp_replicate"] * plan.mesh["dp_shard"]
    assert (plan.ranks, copies, plan.mesh["tp"]) == (2, 2, 1)
    assert rows * plan.microbatches * copies == 32 and rows > 2, "more than the example has"
    run = pipegraph("run", package, "--model", model, "--kernels", "eager", "--steps", 2, "--json")
    assert run.code == 0, run.err
    result = json.loads(run.out)
    assert (result["schedule"], result["ranks"], result["microbatches"]) == ("1f1b", 2, plan.microbatches)
    comparison = result["predicted_and_measured"]
    assert not [hint for hint in comparison["hints"] if "The plan was" in hint]
    assert comparison["collectives"], "the replicas reduce their gradients"
    namespace: dict[str, object] = {}
    exec(model.read_text(), namespace)
    (x,), target = namespace["example_inputs"], namespace["example_target"]  # type: ignore[misc]
    unsplit_model = namespace["build_model"]()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(unsplit_model.parameters(), lr=1e-3)
    for step in result["steps"]:
        loss = nn.functional.mse_loss(unsplit_model(x), target)  # type: ignore[has-type]
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_options_win_over_the_plan(package: Path, pipegraph: Command) -> None:
    """What they leave stays as planned, and what they set aside is told."""
    alone = pipegraph("run", package, "--dp-replicate", 1, "--dp-shard", 1, "--nproc", 1, "--kernels", "autograd")
    assert alone.code == 0, alone.err
    text = " ".join(alone.out.split())
    assert "in a mesh of pp 2 × dp_" in text and "in one pipeline" in text and "--dp-replicate, --dp-shard" in text
    refused = pipegraph("run", package, "--nproc", 1)
    assert refused.code == 2 and refused.out == ""
    assert "1 process" in refused.err and "pp × dp_" in refused.err and "the mesh of the plan" in refused.err


def test_split_refuses_what_contradicts_the_plan(model: Path, package: Path, pipegraph: Command) -> None:
    plan = package.parent / "plan.json"
    refused = pipegraph("split", model, "--plan", plan, "--schedule", "zb-h1", "-o", package.parent / "other")
    assert refused.code == 2 and "leave out --schedule" in refused.err
