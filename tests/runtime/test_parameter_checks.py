"""Parameters that are replaced after the pipeline was made: taken, or refused where others have the old ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from pipegraph.errors import PipegraphError
from tests.runtime import mesh_refusals, meshes, ranks
from tests.runtime.packages import loss, write
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
    before, copied = pipe.stages[2].output.weight, pipe.stages[2].output.weight.detach().clone()
    pipe.stages[2].output.load_state_dict({"weight": copied}, assign=True)
    said = r"^output.weight of stage 2 is not the parameter that was there .*: it is tied to that of another stage"
    with pytest.raises(PipegraphError, match=rf"{said}[^\0]*\nTry: change the values of that one, with copy_\(\)"):
        pipe.step(tokens, target=target)
    pipe.eval(tokens)
    pipe.stages[2].output.weight = before
    pipe.step(tokens, target=target)
    assert before.grad is not None


CASES = [
    (("dp_shard", "assigned"), r"layers0\.0\.0\.weight of stage 0 is not .*: the ranks along dp_shard would"),
    (("dp_shard", "evaluated"), r"layers0\.0\.0\.weight of stage 0 is not .*: the ranks along dp_shard would"),
    (("dp_shard", "added"), r"head\.adapter of stage 0 is not .*: its gradients would not be added up"),
    (("dp_replicate", "assigned"), r"norms0\.0\.weight of stage 0 is not .*: its gradients would not be added up"),
    (("dp_replicate", "added"), r"head\.adapter of stage 0 is not .*: its gradients would not be added up"),
    (("dp_replicate", "loss"), r"loss_fn trains a parameter of shape \[1, 1\], which it did not when"),
]


def test_what_other_ranks_have_as_well_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = str(write(meshes.perceptrons(1, tied=False), tmp_path / "perceptrons"))
    for said in ranks.run(mesh_refusals.each_refused, 2, folder, "changed later", [case for case, _ in CASES]):
        for message, (case, expected) in zip(said, CASES, strict=True):
            assert re.search(f"^PipegraphError: {expected}", message), (case, message)


def test_a_rank_that_replaces_a_tied_weight_stops_the_others(tmp_path: Path) -> None:
    folder = str(write(meshes.perceptrons(2), tmp_path / "perceptrons"))
    cases = [("pp", "replaced")]
    (first,), (second,) = ranks.run(mesh_refusals.each_refused, 2, folder, "changed later", cases)
    assert second.startswith("PipegraphError: head.weight of stage 1 is not the parameter that was there")
    assert first.startswith("RuntimeFault: ") and "rank 1 failed: PipegraphError: head.weight of stage 1" in first
