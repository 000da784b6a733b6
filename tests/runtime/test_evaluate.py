"""`evaluate`: what a step gives, without gradients, in the mode that the stages are in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.errors import PipegraphError
from pipegraph.package import Package
from tests.codegen.parity import split
from tests.messages import refused
from tests.runtime import ranks, sized_model, step_ranks
from tests.runtime.packages import batch, loss, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain, normed


@pytest.mark.parametrize(("schedule", "kernels"), [("1f1b", "autograd"), ("zb-v", "eager")])
def test_it_gives_what_a_step_does(schedule: str, kernels: str, tmp_path: Path) -> None:
    assert step_ranks.evaluation(None, str(sized_model.write(tmp_path)), schedule, kernels) == "equal"


def test_it_gives_it_to_the_rank_of_the_last_stage(tmp_path: Path) -> None:
    folder = str(sized_model.write(tmp_path))
    assert ranks.run(step_ranks.evaluation, 2, folder, "interleaved-1f1b", "autograd") == ["equal"] * 2


def test_it_keeps_the_mode_of_the_stages(tmp_path: Path) -> None:
    pipe = pipeline(write(normed(), tmp_path / "normed"), microbatches=2, loss_fn=loss)
    (x,) = batch(pipe.package.manifest, 2).values()
    for mode in (True, False, True):
        for stage in pipe.stages.values():
            stage.train(mode)
        outputs = [pipe.eval(x) for _ in range(2)]
        assert torch.equal(*outputs) is not mode  # there is dropout
        assert [stage.training for stage in pipe.stages.values()] == [mode] * 2


def test_without_a_target_there_is_no_loss(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=2, loss_fn=lambda output, target: output.mean())
    x = torch.ones(4, 8)
    result = pipe.evaluate(x)
    assert (result.loss, result.losses, result.outputs, result.metrics) == (None, None, None, None)
    outputs = pipe.eval(x)
    assert_close(pipe.evaluate(x, target=None).loss, outputs.mean())  # a loss that needs none


@pytest.mark.parametrize("schedule", ["1f1b", "forward"])
def test_a_target_without_a_loss_function_is_refused(schedule: str, tmp_path: Path) -> None:
    pipe = pipeline(write(chain(1), tmp_path / "chain"), schedule)
    x = torch.ones(2, 8)
    for call in [pipe.evaluate] if schedule == "1f1b" else [pipe.evaluate, pipe.step]:
        with refused(PipegraphError, "target", "loss_fn", advice="Pipeline(…, loss_fn=…)"):
            call(x, target=x)
    assert pipe.eval(x).shape == (2, 8)


def test_a_rank_without_the_last_stage_needs_no_loss_function(tmp_path: Path) -> None:
    assert ranks.run(step_ranks.loss_on_the_last_rank, 2, str(write(chain(2), tmp_path / "chain"))) == ["done"] * 2


def test_no_gradient_is_left(tmp_path: Path) -> None:
    pipe = pipeline(Package.open(write(chain(2), tmp_path / "chain")), loss_fn=loss, kernels="eager")
    result = pipe.evaluate(torch.ones(2, 8), target=torch.ones(2), return_outputs=True)
    assert not result.loss.requires_grad and not result.outputs.requires_grad
    assert all(parameter.grad is None for parameter in pipe.parameters())


class Heads(nn.Module):
    """Returns lists and tuples, other ones in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> object:
        x = self.body(x)
        y = self.head(x)
        if self.training:
            return [y, {"aux": [x, (y + 1,)]}, (x + 1, [])]
        return y, [x]


@pytest.mark.parametrize("training", [True, False])
def test_lists_and_tuples_are_those_of_the_model(training: bool, tmp_path: Path) -> None:
    model, x = Heads().train(training), torch.ones(2, 4)
    package = split(tmp_path, model, (x,), cut="head")
    kinds: list[object] = []
    pipe = pipeline(package, loss_fn=lambda output, _: kinds.append(kinds_of(output)) or torch.zeros(()))
    for stage in pipe.stages.values():
        stage.train(training)
    assert [kinds_of(pipe.evaluate(x, target=None, return_outputs=True).outputs), *kinds] == [kinds_of(model(x))] * 2


def kinds_of(structure: object) -> object:
    if isinstance(structure, dict):
        return {key: kinds_of(item) for key, item in structure.items()}
    return [type(structure), *map(kinds_of, structure)] if isinstance(structure, (list, tuple)) else type(structure)
