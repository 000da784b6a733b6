"""Parameters that are replaced, or get hooks, after the pipeline was made: heeded, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.errors import PipegraphError
from tests.messages import refused
from tests.runtime import mesh_refusals, meshes, ranks
from tests.runtime.packages import Sketch, Stage, loss, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain, tied


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_a_stage_that_nobody_else_has_takes_what_its_modules_hold(kernels: str, tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"), microbatches=2, loss_fn=loss, kernels=kernels)
    x, target = torch.ones(4, 8), torch.zeros(4)
    pipe.step(x, target=target)
    new = nn.Parameter(torch.zeros(8, 8))
    pipe.stages[1].layer1.weight = new
    pipe.step(x, target=target)
    assert pipe.stages[1].layer1.weight is new and new.grad is not None
    assert torch.equal(pipe.eval(x), pipe.stages[1].layer1.bias.detach().expand(4, 8).tanh())


def test_a_tied_weight_that_is_replaced_in_one_place_is_refused_until_it_is_back(tmp_path: Path) -> None:
    pipe = pipeline(write(tied(), tmp_path / "tied"), microbatches=2, loss_fn=loss)
    tokens, target = torch.ones(4, 5, dtype=torch.int64), torch.zeros(4)
    original_weight, copied = pipe.stages[2].output.weight, pipe.stages[2].output.weight.detach().clone()
    pipe.stages[2].output.load_state_dict({"weight": copied}, assign=True)
    with refused(PipegraphError, "output.weight of stage 2", "tied", advice="copy_()"):
        pipe.step(tokens, target=target)
    pipe.eval(tokens)
    pipe.stages[2].output.weight = original_weight
    pipe.step(tokens, target=target)
    assert original_weight.grad is not None


def double(gradient: Tensor) -> Tensor:
    return 2 * gradient


@pytest.mark.filterwarnings("ignore:Stage0 cannot be traced")
def test_hooks_are_called_or_refused_by_name(tmp_path: Path) -> None:
    """Those that are computed with as they are, such as a batch norm's, have theirs called in mixed precision, too."""
    init = "self.layer = nn.Linear(8, 8)\nself.norm = nn.BatchNorm1d(8)"
    values: dict[str, Any] = {"x": ("float32", (2, 8), False), "y": ("float32", (2, 8), True)}
    folder = write(Sketch((Stage("x", "y", init, "return self.norm(self.layer(x))"),), values, "y"), tmp_path / "norm")
    x, target = torch.rand(4, 8), torch.zeros(4)
    for precision, names in ((None, ("layer.weight", "norm.weight")), ("bf16", ("norm.weight",))):
        plain, hooked = (pipeline(folder, microbatches=2, loss_fn=loss, precision=precision) for _ in range(2))
        parameters = dict(hooked.named_parameters())
        for name in names:
            parameters[name].register_hook(double)
        for pipe in (plain, hooked):
            pipe.step(x, target=target)
        for name, parameter in plain.named_parameters():
            assert_close(parameters[name].grad, parameter.grad * (2 if name in names else 1), rtol=1e-2, atol=1e-4)
    parameters["layer.bias"].register_post_accumulate_grad_hook(lambda parameter: None)
    with refused(PipegraphError, "layer.bias of stage 0", "hook", "precision=", advice="without the hook"):
        hooked.step(x, target=target)


CASES = [
    (("dp_shard", "assigned"), r"layers0\.0\.0\.weight of stage 0 is not .*: the ranks along dp_shard would"),
    (("dp_shard", "evaluated"), r"layers0\.0\.0\.weight of stage 0 is not .*: the ranks along dp_shard would"),
    (("dp_shard", "added"), r"head\.adapter of stage 0 is not .*: its gradients would not be added up"),
    (("dp_shard", "hooked"), r"head\.weight of stage 0 has a hook, which would not be called: along dp_shard"),
    (("dp_replicate", "assigned"), r"norms0\.0\.weight of stage 0 is not .*: its gradients would not be added up"),
    (("dp_replicate", "added"), r"head\.adapter of stage 0 is not .*: its gradients would not be added up"),
    (("dp_replicate", "loss"), r"loss_fn trains a parameter of shape \[1, 1\], which it did not when"),
]


def test_what_other_ranks_have_as_well_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = str(write(meshes.perceptrons(1, tied=False), tmp_path / "perceptrons"))
    for messages in ranks.run(mesh_refusals.each_refused, 2, folder, "changed later", [case for case, _ in CASES]):
        for message, (case, expected) in zip(messages, CASES, strict=True):
            assert re.search(f"^PipegraphError: {expected}", message), (case, message)


def test_a_rank_that_replaces_a_tied_weight_stops_the_others(tmp_path: Path) -> None:
    folder = str(write(meshes.perceptrons(2), tmp_path / "perceptrons"))
    cases = [("pp", "replaced")]
    (first,), (second,) = ranks.run(mesh_refusals.each_refused, 2, folder, "changed later", cases)
    assert second.startswith("PipegraphError: head.weight of stage 1")
    assert first.startswith("RuntimeFault: ") and "rank 1 failed: PipegraphError: head.weight of stage 1" in first
