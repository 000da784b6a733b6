"""`Pipeline(precision=)`: parity with the unsplit model in the same precision, float32 masters, and what is refused."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import pipegraph
from pipegraph.errors import ArgumentError, PipegraphError
from tests.messages import refused
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
    assert {weight.dtype for weight in pipe.parameters()} == {stored}
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


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_a_loss_may_write_to_its_target(package: Path, kernels: str) -> None:
    def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output.float(), target.masked_fill_(target < 0, 0.0))

    x, target = models.batch()
    pipe, expected = (models.start(package, "bf16", loss_fn=loss, kernels=kernels) for loss in (masked, models.loss))
    loss = pipe.step(x, target=target).loss
    assert not target.lt(0).any()
    assert_close(loss, expected.step(x, target=target).loss)


def test_small_changes_are_not_lost(package: Path) -> None:
    pipe = models.start(package, "bf16")
    head = {name: parameter for name, parameter in pipe.named_parameters() if name.startswith("head")}
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
    assert first == second == alone


def test_ranks_that_share_parameters_gather_them_in_it(package: Path, tmp_path: Path) -> None:
    folder = models.write_package(tmp_path / "one", stages=1, has_norm=False)
    alone = models.train(models.start(folder, "bf16", "gpipe"))
    first, second = ranks.run(models.train_rank, 2, str(folder), "bf16", {"pp": 1, "dp_shard": 2})
    assert first == second == pytest.approx(alone, rel=1e-2)


def test_a_batch_norm_is_not_gathered_in_16_bits(tmp_path: Path) -> None:
    folder = models.write_package(tmp_path / "one", stages=1)
    messages = ranks.run(models.train_rank, 2, str(folder), "bf16", {"pp": 1, "dp_shard": 2})
    assert all("batch norm" in message and "norm" in message for message in messages)


def test_a_checkpoint_keeps_float32(package: Path, tmp_path: Path) -> None:
    first = models.start(package, "bf16")
    optimizer = torch.optim.AdamW(first.parameters())
    x, target = models.batch()
    first.step(x, target=target)
    optimizer.step()
    optimizer.zero_grad()
    first.save(tmp_path, optimizer, step=3)
    restored = models.start(package, "bf16", schedule="gpipe")
    again = torch.optim.AdamW(restored.parameters())
    restored.load(tmp_path, again)
    for saved_parameter, two in zip(first.parameters(), restored.parameters(), strict=True):
        assert saved_parameter.dtype == two.dtype == torch.float32 and torch.equal(saved_parameter, two)
        assert again.state[two]["exp_avg"].dtype == torch.float32
    assert any(not torch.equal(parameter, parameter.bfloat16().float()) for parameter in restored.parameters())
    assert models.train(restored, 1) == models.train(first, 1)


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
    assert {weight.dtype for weight in pipe.parameters()} == {torch.float32}
    pipe.step(x, target=None)
    model(x).float().mean().backward()
    for parameter, expected in zip(pipe.parameters(), model.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None
        assert_close(parameter.grad, expected.grad.float())


def test_wrong_names_are_refused(package: Path) -> None:
    with refused(ArgumentError, "'bf61'", '"bf16"', "fp16-true", advice='precision="bf16"'):
        models.start(package, "bf61")
    with refused(PipegraphError, "precision=", "object", advice="compute_in"):
        models.start(package, "bf16", kernels=lambda *_: object())


def test_what_is_frozen_later_has_no_gradient(package: Path) -> None:
    pipe = models.start(package, "bf16")
    frozen = dict(pipe.named_parameters())["head.weight"].requires_grad_(False)
    x, target = models.batch()
    pipe.step(x, target=target)
    assert frozen.grad is None


class Tables(nn.Module):
    """Frequencies that are cast, a table that is computed with, and two buffers that each forward adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(8) / 8))
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count.add_(1)
            self.average.mul_(0.999).add_(x.detach().mean((0, 1)), alpha=0.001)
        positions = torch.arange(x.shape[1], device=x.device)[:, None]
        angles = positions.float() * self.frequencies[None].float()
        return self.inner(x + self.table) * 0 + angles.cos().to(x.dtype)


class WithTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Tables()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize(("precision", "kernels"), [("bf16", "eager"), ("bf16", "autograd"), ("bf16-true", "eager")])
def test_buffers_are_not_rounded_for_nothing(precision: str, kernels: str, tmp_path: Path) -> None:
    """In bfloat16 an angle of 999 would be one of 1000, a count would end at 256, and an average would not move."""
    captured = pipegraph.capture(WithTables(), (torch.zeros(2, 1000, 8),))
    package = pipegraph.write_package(pipegraph.plan(captured, points=["second"]), tmp_path / "package").path
    pipe = models.start(package, precision, kernels=kernels, loss_fn=lambda output, _: output.float().square().mean())
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    for _ in range(75):
        pipe.step(torch.zeros(8, 1000, 8))
    state = pipe.state_dict()
    assert state["second.count"] == 300
    assert_close(state["second.average"], torch.full((8,), 0.999**300))
    cos = pipe.eval(torch.zeros(8, 1000, 8))
    assert cos.dtype == torch.bfloat16
    expected = (torch.arange(1000.0)[:, None] * state["second.frequencies"]).cos().expand(8, -1, -1)
    assert_close(cos.float(), expected, rtol=0, atol=2**-8)


class Centred(nn.Module):
    """Computes with the average that it keeps, in the average's own dtype or in its input's."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.first, self.inner, self.casts = nn.Linear(8, 8), nn.Linear(8, 8), casts
        self.register_buffer("average", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.average.mul_(0.999).add_(x.detach().mean(0), alpha=0.001)
        return self.inner(x - (self.average.to(x.dtype) if self.casts else self.average))


@pytest.mark.parametrize("casts", [True, False])
def test_an_average_that_is_rounded_is_named(casts: bool, tmp_path: Path) -> None:
    captured = pipegraph.capture(Centred(casts), (torch.randn(4, 8),))
    package = pipegraph.write_package(pipegraph.plan(captured, points=["inner"]), tmp_path / "package").path
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = models.start(package, "bf16", loss_fn=lambda output, _: output.float().square().mean())
    rounded = [str(warning.message) for warning in caught if "loses small changes" in str(warning.message)]
    assert len(rounded) == (not casts)
    assert all("average" in message and ".to(x.dtype)" in message for message in rounded)
    for _ in range(10):
        pipe.step(torch.randn(16, 8))
    assert bool(pipe.state_dict()["average"].eq(1).all()) == (not casts)


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_a_step_follows_an_evaluation_in_inference_mode(package: Path, kernels: str) -> None:
    pipe, (x, target) = models.start(package, "bf16", kernels=kernels), models.batch()
    with torch.inference_mode():
        pipe.evaluate(x, target=target)
    loss = pipe.step(x, target=target).loss
    assert_close(loss, models.start(package, "bf16", kernels=kernels).step(x, target=target).loss)


def test_what_a_checkpoint_computes_again_has_the_copies(package: Path) -> None:
    def checkpointed(stage: nn.Module) -> None:
        for layer in stage.layers.children():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]

    x, target = models.batch()
    expected, checkpointed_pipe = (
        models.start(package, "bf16", kernels="autograd", parallelize_fn=wrap) for wrap in (None, checkpointed)
    )
    assert_close(checkpointed_pipe.step(x, target=target).loss, expected.step(x, target=target).loss)
    for parameter, expected_parameter in zip(checkpointed_pipe.parameters(), expected.parameters(), strict=True):
        assert_close(parameter.grad, expected_parameter.grad)
