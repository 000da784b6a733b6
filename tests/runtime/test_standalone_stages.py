"""`StandaloneStages`, and torch's own PipelineStage over packages that relay what skips a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import pipegraph
from pipegraph.errors import ArgumentError
from pipegraph.package import Package
from tests.messages import refused
from tests.models import skipping
from tests.models.skipping import build_model, example_inputs
from tests.runtime import ranks
from tests.runtime.packages import write
from tests.runtime.sketches import tied
from tests.torch_version import TORCH


def relayed_by_torch(rank: int, folder: str, name: str, steps: int) -> str:
    """A schedule of torch runs a package with a skip and a tied weight, and trains as the model does."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    package, model = Package.open(folder), skipping.build_model()
    count = len(package.manifest.stages)
    modules = {index: package.load_stage(index) for index in range(rank, count, dist.get_world_size())}
    if count - 1 in modules:  # as after a change: the copies start as the first stage's
        modules[count - 1].head.weight.data.zero_()
    ties = pipegraph.StandaloneStages(package, modules)
    stages = [PipelineStage(stage, index, count, torch.device("cpu")) for index, stage in modules.items()]
    kind: Any = get_schedule_class(name)
    schedule = kind(stages if len(stages) > 1 else stages[0], n_microbatches=4, loss_fn=skipping.loss_fn)
    stage = torch.nn.ModuleList(modules.values())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (stage, model)]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens, target = torch.randint(skipping.VOCABULARY, (2, 8, 5), generator=generator)
        scale = torch.rand(8, 5, 1, generator=generator)
        inputs = tokens, scale, torch.randint(2, (8, 5), generator=generator)
        with ties.summed_gradients():
            schedule.step(*(inputs if 0 in modules else ()), **({"target": target} if count - 1 in modules else {}))
        skipping.loss_fn(model(*inputs), target).backward()
        expected = dict(model.named_parameters(remove_duplicate=False))
        for index, module in modules.items():
            for key, parameter in module.named_parameters():
                assert_close(parameter.grad, expected[key].grad, msg=f"{key} of stage {index} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return "equal"


def stages_on_ranks(rank: int, folder: str, stages: list[list[int]]) -> str:
    """What a rank says that makes `StandaloneStages` of these stages."""
    package = Package.open(folder)
    pipegraph.StandaloneStages(package, {index: package.load_stage(index) for index in stages[rank]}, timeout=20)
    return "tied"


@pytest.mark.skipif(TORCH < (2, 12), reason="torch's PipelineStage of 2.11 receives floating-point tensors alone")
@pytest.mark.parametrize(
    ("name", "points", "processes"),
    [("1F1B", ["middle", "norm"], 3), ("InterleavedZeroBubble", ["middle", "late", "norm"], 2)],
)
def test_torch_runs_relayed_skips_and_tied_weights(
    name: str, points: list[str], processes: int, tmp_path: Path
) -> None:
    plan = pipegraph.plan(pipegraph.capture(build_model(), example_inputs), points, relay_skips=True)
    folder = str(pipegraph.write_package(plan, tmp_path / "out").path)
    assert ranks.run(relayed_by_torch, processes, folder, name, 2) == ["equal"] * processes


def test_a_stage_on_two_ranks_or_on_none(tmp_path: Path) -> None:
    folder = str(write(tied(), tmp_path / "tied"))
    messages = ranks.run(stages_on_ranks, 2, folder, [[0, 1], [1]])
    assert all("ArgumentError: Stage 1 is on the ranks 0, 1" in message for message in messages)


def test_one_process_holds_all_stages(tmp_path: Path) -> None:
    package = Package.open(write(tied(), tmp_path / "tied"))
    stages = {index: package.load_stage(index) for index in range(len(package.manifest.stages))}
    names = package.manifest.tied[0]
    places = [(stage, name) for stage in stages.values() for name, _ in stage.named_parameters() if name in names]
    assert len({id(stage.get_parameter(name)) for stage, name in places}) > 1
    ties = pipegraph.StandaloneStages(package, stages)
    shared = {id(stage.get_parameter(name)) for stage, name in places}
    assert len(shared) == 1
    parameter = places[0][0].get_parameter(places[0][1])
    parameter.grad = torch.ones_like(parameter)
    with ties.summed_gradients():
        (2 * parameter).sum().backward()
    assert torch.equal(parameter.grad, torch.full_like(parameter, 3.0))


@pytest.mark.parametrize(
    ("stages", "parts", "advice"),
    [
        ([nn.Identity()], ["stages", "a list"], "{0: stage}"),
        ({0: "stage"}, ["stages", "'stage'"], "{0: stage}"),
        ({0: nn.Linear(2, 2)}, ["Stage 1 is on no rank"], "3 ranks"),
        ({9: nn.Linear(2, 2)}, ["Stage 0 is on no rank"], "4 ranks"),
    ],
    ids=str,
)
def test_what_are_no_stages(stages: Any, parts: list[str], advice: str, tmp_path: Path) -> None:
    with refused(ArgumentError, *parts, advice=advice):
        pipegraph.StandaloneStages(write(tied(), tmp_path / "tied"), stages)


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.first(x), y], dim=1))


def test_gradients_of_inputs_are_contiguous(tmp_path: Path) -> None:
    captured = pipegraph.capture(Concatenated(), (torch.randn(2, 4), torch.randn(2, 4)))
    package = pipegraph.write_package(pipegraph.plan(captured, ["first:end"]), tmp_path / "out")
    stages = {index: package.load_stage(index) for index in range(2)}
    received = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    assert not torch.autograd.grad(stages[1](*received).sum(), received)[0].is_contiguous()
    pipegraph.StandaloneStages(package, stages)
    gradients = torch.autograd.grad(stages[1](*received).sum(), received)
    assert [gradient.is_contiguous() for gradient in gradients] == [True, True]


def test_a_stage_with_other_parameters(tmp_path: Path) -> None:
    package = Package.open(write(tied(), tmp_path / "tied"))
    stages: dict[int, nn.Module] = {index: nn.Linear(2, 2) for index in range(len(package.manifest.stages))}
    with refused(ArgumentError, "stage 0", "missing", "embed.weight", "added", advice="load_stage(0)"):
        pipegraph.StandaloneStages(package, stages)
    stages = {**stages, len(stages): nn.Identity()}
    with refused(ArgumentError, f"no stage {len(stages) - 1}", "0 to", advice="one of these"):
        pipegraph.StandaloneStages(package, stages)
