"""Random operations as functions of a key: their distributions, and each operation in each kind of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.kernels import SeededKernels, make
from pipegraph.kernels.random_operations import CounterGenerator
from pipegraph.runtime.random_numbers import RandomNumbers
from tests.kernels.stages import Function, Layers
from tests.slow import cases

COUNT = 200_000
CPU = torch.device("cpu")


class Keys:
    """The keys of draws in tests."""

    def key(self, module: str, number: int) -> int:
        return RandomNumbers(seed=0).key(f"{module}#{number}", 0)


def numbers(key: int = 0x9E3779B97F4A7C15 - 2**64) -> CounterGenerator:
    return CounterGenerator(key, CPU)


def test_every_bit_of_the_numbers_of_two_keys_is_independent() -> None:
    numbers_of = RandomNumbers(seed=0)
    samples = torch.stack([numbers(numbers_of.key(f"dropout#{number}", 0)).bits([COUNT]) for number in range(2)])
    bits = torch.stack([(samples >> place) & 1 for place in range(32)], 1).reshape(64, -1).double()
    correlation = torch.corrcoef(bits)
    following = torch.corrcoef(torch.cat([bits[:, 1:], bits[:, :-1]]))[:64, 64:]
    limit = 6 / math.sqrt(COUNT)
    assert (bits.mean(1) - 0.5).abs().max() < limit
    assert (correlation - torch.eye(64)).abs().max() < limit
    assert following.abs().max() < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_uniform_numbers_lie_between_0_and_1(dtype: torch.dtype) -> None:
    samples = numbers().uniform([COUNT], dtype)
    assert samples.dtype == dtype and samples.min() > 0 and samples.max() < 1
    counts = torch.histc(samples.float(), 64, 0, 1)
    assert ((counts - COUNT / 64).square() / (COUNT / 64)).sum() < 63 + 6 * math.sqrt(126)


EXPECTED: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rand_like": (torch.rand_like, 0.5, math.sqrt(1 / 12)),
    "randn": (lambda x: torch.randn(x.shape), 0.0, 1.0),
    "normal": (lambda x: torch.normal(2.0, torch.full_like(x, 3.0)), 2.0, 3.0),
    "normal_": (lambda x: x.clone().normal_(1.0, 0.5), 1.0, 0.5),
    "uniform_": (lambda x: x.clone().uniform_(-1.0, 3.0), 1.0, 4 / math.sqrt(12)),
    "exponential_": (lambda x: x.clone().exponential_(2.0), 0.5, 0.5),
    "log_normal_": (lambda x: x.clone().log_normal_(0.0, 0.5).log(), 0.0, 0.5),
    "geometric_": (lambda x: x.clone().geometric_(0.25), 4.0, math.sqrt(12)),
    "cauchy_": (lambda x: x.clone().cauchy_(1.0, 2.0).sub(1).div(2).atan(), 0.0, math.pi / math.sqrt(12)),
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.2)), 0.2, 0.4),
    "bernoulli_": (lambda x: x.clone().bernoulli_(0.2), 0.2, 0.4),
    "randint": (lambda x: torch.randint(3, 7, x.shape).float(), 4.5, math.sqrt(15 / 12)),
    "randint_like": (lambda x: torch.randint_like(x, 4), 1.5, math.sqrt(15 / 12)),
    "random_": (lambda x: torch.zeros(x.shape, dtype=torch.int64).random_(0, 4).float(), 1.5, math.sqrt(15 / 12)),
    "randperm": (lambda x: torch.randperm(x.numel()).float().sub(COUNT / 2).div(COUNT), 0.0, math.sqrt(1 / 12)),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([0.5, 0.0, 0.5]), x.numel(), replacement=True).float(),
        1.0,
        1.0,
    ),
    "dropout": (lambda x: F.dropout(torch.ones_like(x), 0.5), 1.0, 1.0),
    "alpha_dropout": (lambda x: F.alpha_dropout(torch.randn_like(x), 0.3), 0.0, 1.0),
    "feature_dropout": (lambda x: F.dropout1d(torch.ones(x.numel(), 1, 1), 0.5).flatten(), 1.0, 1.0),
    "poisson": (lambda x: torch.poisson(torch.full_like(x, 4.0)), 4.0, 2.0),
}


@pytest.mark.filterwarnings("ignore:.*is left to autograd.*")
@pytest.mark.parametrize("name", cases(list(EXPECTED), slow=list(EXPECTED)[::2]))
def test_every_operation_draws_from_its_key(name: str) -> None:
    draw, mean, deviation = EXPECTED[name]
    results = []
    for kernels in ("eager", "autograd", "eager"):
        stage = Function(lambda self, x: self.scale * draw(x) + draw(x), scale=nn.Identity())
        stage.scale = nn.Parameter(torch.zeros(()))
        results.append(run(stage, kernels, torch.zeros(COUNT)))
    samples, outside, again = results
    assert torch.equal(samples, again) and torch.equal(samples, outside)
    limit = 6 / math.sqrt(COUNT)
    assert samples.mean().item() == pytest.approx(mean, abs=limit * deviation + 1e-3)
    assert samples.std().item() == pytest.approx(deviation, rel=0.03)


def run(stage: nn.Module, kernels: str, *inputs: Tensor) -> Any:
    stage_kernels = make(kernels, stage, [False] * len(inputs), [True])
    assert isinstance(stage_kernels, SeededKernels)
    stage_kernels.draw_from(Keys())
    (output,) = stage_kernels.forward(inputs).outputs
    return output


def test_what_is_drawn_without_replacement_comes_once() -> None:
    weights = torch.tensor([0.1, 0.2, 0.0, 0.7]).expand(1000, 4)
    samples = run(Function(lambda self, x: torch.multinomial(x, 3)), "eager", weights)
    assert {tuple(sorted(row)) for row in samples.tolist()} == {(0, 1, 3)}
    assert (samples[:, 0] == 3).float().mean().item() == pytest.approx(0.7, abs=0.06)


def test_the_mask_of_a_dropout_is_its_gradients() -> None:
    stage = Function(lambda self, x: F.dropout(x, 0.25))
    kernels = make("eager", stage, [True], [True], recompute="block")
    assert isinstance(kernels, SeededKernels)
    kernels.draw_from(Keys())
    forward = kernels.forward([torch.ones(1000)])
    (gradient,) = kernels.backward(forward.saved, [torch.ones(1000)])
    assert torch.equal(gradient, forward.outputs[0])


def test_compiled_kernels_draw_the_same_in_layers_that_share_them() -> None:
    stage, results = Layers(2, p=0.5), {}
    for kernels in ("eager", "inductor"):
        stage_kernels = make(kernels, stage, [True], [True])
        assert isinstance(stage_kernels, SeededKernels)
        stage_kernels.draw_from(Keys())
        forward = stage_kernels.forward([torch.ones(4, 8)])
        results[kernels] = forward.outputs[0], *stage_kernels.backward(forward.saved, [torch.ones(4, 4)])
    assert_close(results["inductor"], results["eager"], rtol=1e-5, atol=1e-4)  # sums in another order


def test_an_own_generator_stays_the_users() -> None:
    generator = torch.Generator().manual_seed(3)
    stage = Function(lambda self, x: x + torch.rand(4, generator=generator))
    samples = run(stage, "autograd", torch.zeros(4))
    assert torch.equal(samples, torch.rand(4, generator=torch.Generator().manual_seed(3)))
