"""Stages in torch's wrappers: DistributedDataParallel, `replicate` and the checkpoint wrapper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.runtime import ranks, replicated, sharded
from tests.runtime.packages import Reference, loss, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain, normed, tied


@pytest.mark.parametrize(
    ("schedule", "kernels", "checkpoints", "reduction"),
    [("1f1b", "autograd", True, "mean"), ("zb-h1", "eager", False, "mean"), ("gpipe", "autograd", False, "sum")],
)
def test_replicas_train_as_the_whole_model_on_the_whole_batch(
    schedule: str, kernels: str, checkpoints: bool, reduction: str, tmp_path: Path
) -> None:
    """Two pipelines of two ranks; a weight is tied between the stages. Nothing is left to autograd."""
    folder = str(write(sharded.perceptrons(), tmp_path / "perceptrons"))
    assert ranks.run(replicated.train, 4, folder, schedule, kernels, checkpoints, reduction) == ["equal"] * 4


def test_fsdp_replicas(tmp_path: Path) -> None:
    assert ranks.run(replicated.fully_sharded_replicas, 4, str(write(chain(2), tmp_path / "chain"))) == ["equal"] * 4


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "inside",
            r"DistributedDataParallel around layer0 in stage 0, .*\nTry: return DistributedDataParallel\(stage",
        ),
        ("replicate", r"applied replicate to stage 0\. It reduces the gradients of the first microbatch alone"),
        ("replicate inside", "applied replicate to layer0 in stage 0"),
        ("mixed precision", "stage 0 the mixed_precision of DistributedDataParallel"),
        ("hook", "stage 0 has a communication hook"),
        ("hook later", "stage [01] has a communication hook"),  # of the rank that comes first
    ],
)
def test_what_would_reduce_wrongly_is_refused(how: str, message: str, tmp_path: Path) -> None:
    messages = ranks.run(replicated.refused, 4, str(write(chain(2), tmp_path / "chain")), how)
    for first_stage in (messages[0], messages[2]):
        assert re.search(message, first_stage, re.DOTALL), first_stage


def test_what_only_some_replicas_have(tmp_path: Path) -> None:
    folder = str(write(normed(), tmp_path / "normed"))
    (buffers, gradients), _, (other_buffers, other_gradients), _ = ranks.run(replicated.parts_of_the_state, 4, folder)
    assert len(buffers) == 4 and all(map(torch.equal, buffers, other_buffers))  # the first replica's
    assert buffers[0].tolist() == [True, False, True]
    assert gradients["norm.weight"].any()
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_checkpoint_wrappers_keep_the_names_of_the_model(tmp_path: Path) -> None:
    """A tied weight is in a wrapper at both of its places."""
    folder = write(tied(), tmp_path / "tied")
    plain = pipeline(folder, microbatches=2, loss_fn=loss)
    pipe = pipeline(folder, microbatches=2, loss_fn=loss, parallelize_fn=replicated.with_checkpoints)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert pipe.state_dict().keys() == plain.state_dict().keys()
    x = torch.ones(4, 5, dtype=torch.int64)
    for variant in (plain, pipe):
        variant.step(x, target=torch.zeros(4))
    for wrapped_parameter, plain_parameter in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(wrapped_parameter.grad, plain_parameter.grad)
    pipe.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in plain.state_dict().items()})
    assert not any(parameter.any() for parameter in pipe.parameters())


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_checkpoint_wrappers_train(kernels: str, tmp_path: Path) -> None:
    folder = write(chain(2), tmp_path / "chain")
    pipe = pipeline(folder, "zb-h1", kernels, microbatches=2, loss_fn=loss, parallelize_fn=replicated.with_checkpoints)
    reference = Reference(pipe.package)
    x = torch.randn(4, 8)
    loss(reference({"x": x}), torch.zeros(4)).backward()
    pipe.step(x, target=torch.zeros(4))
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, reference.parameters[name].grad)
