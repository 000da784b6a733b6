"""`Pipeline(precision=)`: parity with the unsplit model in the same precision, float32 masters, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import pipegraph
from pipegraph.errors import ArgumentError, PipegraphError
from tests.runtime import precision_models as models
from tests.runtime import ranks


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_package(tmp_path_factory.mktemp("precision") / "package")


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-true", "fp32"])
def test_a_step_is_that_of_the_unsplit_model(package: Path, precision: str, kernels: str) -> None:
    pipe = models.start(package, precision, schedule="zb-h1", kernels=kernels)
    stored = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {each.dtype for each in pipe.parameters()} == {stored}
    x, target = models.batch()
    loss = pipe.step(x, target=target).loss
    expected, gradients, statistics = models.reference_step(precision)
    assert_close(loss, expected.to(loss.dtype if loss is not None else None), rtol=1e-2, atol=1e-3)
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == stored
        assert_close(parameter.grad.float(), gradients[name].float(), rtol=2e-2, atol=2e-3, msg=name)
    for name, value in statistics.items():
        assert_close(pipe.state_dict()[name], value, rtol=1e-2, atol=1e-3)


def test_the_gradients_of_many_microbatches_are_added_up_in_float32(package: Path) -> None:
    """In bfloat16 a sum of 257 twos is 512."""
    pipe = models.start(package, "bf16", microbatches=257, loss_fn=lambda output, _: output.sum(), loss_reduction="sum")
    pipe.step(torch.zeros(514, models.WIDTH), target=None)
    bias = dict(pipe.named_parameters())["head.bias"]
    assert bias.grad is not None and bias.grad.eq(514).all()


def test_small_changes_are_not_lost(package: Path) -> None:
    pipe = models.start(package, "bf16")
    head = {name: each for name, each in pipe.named_parameters() if name.startswith("head")}
    with torch.no_grad():
        head["head.weight"].zero_()
        head["head.bias"].fill_(1.0)
        for _ in range(8):
            head["head.bias"] += 1e-3  # too little for a bfloat16 next to 1
    output = pipe.eval(models.batch()[0])
    assert output.dtype == torch.bfloat16 and output.eq(1 + 2**-7).all()


def test_what_crosses_has_the_dtype_of_computing(package: Path) -> None:
    values = models.start(package, "bf16").package.manifest.values
    assert {value.dtype for value in values.values()} == {"bfloat16"}


def test_two_processes_send_it(package: Path) -> None:
    alone = models.train(models.start(package, "bf16"))
    first, second = ranks.run(models.train_rank, 2, str(package), "bf16", {"pp": 2})
    assert first == [None] * len(alone) and second == alone


def test_ranks_that_share_parameters_gather_them_in_it(package: Path, tmp_path: Path) -> None:
    one = models.write_package(tmp_path / "one", stages=1, has_norm=False)
    alone = models.train(models.start(one, "bf16", "gpipe"))
    first, second = ranks.run(models.train_rank, 2, str(one), "bf16", {"pp": 1, "dp_shard": 2})
    assert first == second == pytest.approx(alone, rel=1e-2)


def test_a_batch_norm_is_not_gathered_in_16_bits(tmp_path: Path) -> None:
    one = models.write_package(tmp_path / "one", stages=1)
    said = ranks.run(models.train_rank, 2, str(one), "bf16", {"pp": 1, "dp_shard": 2})
    assert all("batch norm" in each and "norm" in each for each in said)


def test_a_checkpoint_keeps_float32(package: Path, tmp_path: Path) -> None:
    first = models.start(package, "bf16")
    optimizer = torch.optim.AdamW(first.parameters())
    x, target = models.batch()
    first.step(x, target=target)
    optimizer.step()
    optimizer.zero_grad()
    first.save(tmp_path, optimizer, step=3)
    other = models.start(package, "bf16", schedule="gpipe")
    again = torch.optim.AdamW(other.parameters())
    other.load(tmp_path, again)
    for one, two in zip(first.parameters(), other.parameters(), strict=True):
        assert one.dtype == two.dtype == torch.float32 and torch.equal(one, two)
        assert again.state[two]["exp_avg"].dtype == torch.float32
    assert any(not torch.equal(each, each.bfloat16().float()) for each in other.parameters())
    assert models.train(other, 1) == models.train(first, 1)


def test_a_scaler_trains_in_float16(package: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    pipe = models.start(
        package, "fp16", loss_fn=lambda output, target: scaler.scale(F.mse_loss(output.float(), target))
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, target = models.batch()
    losses = []
    for _ in range(5):
        loss = pipe.step(x, target=target).loss
        assert loss is not None
        losses.append(loss.item() / scaler.get_scale())
        scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_a_model_of_bfloat16_has_float32_masters(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    plan = pipegraph.plan(pipegraph.capture(model, (x,)), stages=1)
    package = pipegraph.write_package(plan, tmp_path / "package")
    pipe = models.start(package, "bf16", microbatches=1, loss_fn=lambda output, _: output.float().mean())
    assert {each.dtype for each in pipe.parameters()} == {torch.float32}
    pipe.step(x, target=None)
    model(x).float().mean().backward()
    for own, expected in zip(pipe.parameters(), model.parameters(), strict=True):
        assert own.grad is not None and expected.grad is not None
        assert_close(own.grad, expected.grad.float())


def test_wrong_names_are_refused(package: Path) -> None:
    with pytest.raises(ArgumentError, match=r"bf61.*bf16.*fp16-true"):
        models.start(package, "bf61")
    with pytest.raises(PipegraphError, match="compute_in"):
        models.start(package, "bf16", kernels=lambda *_: object())


def test_what_is_frozen_later_has_no_gradient(package: Path) -> None:
    pipe = models.start(package, "bf16")
    frozen = dict(pipe.named_parameters())["head.weight"].requires_grad_(False)
    x, target = models.batch()
    pipe.step(x, target=target)
    assert frozen.grad is None
