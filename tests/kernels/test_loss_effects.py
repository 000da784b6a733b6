"""A loss that reads a clock, or seeds a generator, is not traced once for all steps."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipegraph import Pipeline
from tests.messages import warned
from tests.runtime.packages import write
from tests.runtime.sketches import chain

X = torch.ones(2, 8)


def seeds(output: Tensor, target: object) -> Tensor:
    torch.manual_seed(5)
    return (output * torch.rand(output.shape)).square().mean()


def seeds_generator(output: Tensor, target: object) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(1)
    return (output * torch.rand(output.shape, generator=generator)).square().mean()


def draws(output: Tensor, target: object) -> Tensor:
    return output.square().mean() * random.Random(len(times)).random()


def draws_of_numpy(output: Tensor, target: object) -> Tensor:
    return output.square().mean() * float(numpy.random.random())


def reads_clock(output: Tensor, target: object) -> Tensor:
    times.append(time.perf_counter())
    return output.square().mean() * (1 + len(times))


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        times.append(time.perf_counter())
        return gradients[0] * len(times)


def reads_clock_in_backward(output: Tensor, target: object) -> Tensor:
    result: Tensor = _Timed.apply(output)
    return result.square().mean()


def reads_clock_in_operation(output: Tensor, target: object) -> Tensor:
    """A function that torch calls, while its own are not reported."""

    def distance(a: Tensor, b: Tensor) -> Tensor:
        times.append(time.perf_counter())
        return (a - b).square().sum(1) * len(times)

    return F.triplet_margin_with_distance_loss(output, output + 1, output - 3, distance_function=distance)


times: list[float] = []


@pytest.mark.parametrize("loss_fn", [seeds, seeds_generator])
def test_a_loss_that_seeds_is_what_it_is_without_kernels(
    loss_fn: Callable[[Tensor, object], Tensor], tmp_path: Path
) -> None:
    package, losses = write(chain(2), tmp_path / "package"), []
    for kernels in ("autograd", "eager"):
        pipe = Pipeline(package, kernels=kernels, loss_fn=loss_fn, loss_over="microbatch")
        if kernels == "eager":
            with pytest.warns(UserWarning, match=r"left to autograd, .*(sets the state of a random|Generator)"):
                losses.append([pipe.step(X).loss for _ in range(3)])
        else:
            losses.append([pipe.step(X).loss for _ in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("loss_fn", "parts"),
    [
        (reads_clock, ["clock", "test_loss_effects.py:"]),
        (reads_clock_in_backward, ["clock", "test_loss_effects.py:"]),
        (reads_clock_in_operation, ["clock", "test_loss_effects.py:"]),
        (draws, ["random number", "test_loss_effects.py:"]),
        (draws_of_numpy, ["random number", "numpy.random"]),
    ],
)
def test_what_a_loss_does_is_named(
    loss_fn: Callable[[Tensor, object], Tensor], parts: list[str], tmp_path: Path
) -> None:
    pipe = Pipeline(write(chain(2), tmp_path / "package"), kernels="eager", loss_fn=loss_fn, loss_over="microbatch")
    with warned(*parts):
        pipe.step(X)


@pytest.mark.filterwarnings("ignore:Stage1 cannot be traced")
@pytest.mark.parametrize("of_numpy", [False, True])
def test_the_numbers_of_a_loss_are_those_without_kernels(of_numpy: bool, tmp_path: Path) -> None:
    """Finding out that it draws takes none of them."""
    package, losses = write(chain(2), tmp_path / "package"), []
    for kernels in ("autograd", "eager"):
        generator = random.Random(0)
        numpy.random.seed(0)

        def loss_fn(output: Tensor, target: object, generator: random.Random = generator) -> Tensor:
            return output.square().mean() * (numpy.random.random() if of_numpy else generator.random())

        pipe = Pipeline(package, kernels=kernels, loss_fn=loss_fn, loss_over="microbatch")
        losses.append([pipe.step(X).loss for _ in range(3)])
    assert losses[0] == losses[1] and len(set(map(float, losses[0]))) == 3


@pytest.mark.filterwarnings("ignore:Stage1 cannot be traced")  # torch 2.11 traces no generator
def test_a_generator_of_the_loss_is_advanced_by_each_step(tmp_path: Path) -> None:
    package, losses = write(chain(2), tmp_path / "package"), []
    for kernels in ("autograd", "eager"):
        generator = torch.Generator().manual_seed(3)

        def loss_fn(output: Tensor, target: object, generator: torch.Generator = generator) -> Tensor:
            return (output * torch.rand(output.shape, generator=generator)).square().mean()

        pipe = Pipeline(package, kernels=kernels, loss_fn=loss_fn, loss_over="microbatch")
        losses.append([pipe.step(X).loss for _ in range(3)])
    assert losses[0] == losses[1] and len(set(map(float, losses[0]))) == 3


def test_callbacks_of_the_garbage_collector_are_not_the_losses(tmp_path: Path) -> None:
    """Such as those of hypothesis, which reads a clock there."""
    installed = tmp_path / "site-packages" / "library.py"
    installed.parent.mkdir()
    installed.write_text("import time\n\ndef callback(phase, info):\n    time.perf_counter()\n")
    scope: dict[str, Callable[..., None]] = {}
    exec(compile(installed.read_text(), str(installed), "exec"), scope)

    def loss_fn(output: Tensor, target: object) -> Tensor:
        gc.collect()
        return output.square().mean()

    gc.callbacks.append(scope["callback"])
    try:
        pipe = Pipeline(write(chain(2), tmp_path / "out"), kernels="eager", loss_fn=loss_fn, loss_over="microbatch")
        pipe.step(X)  # without a warning, which is an error here
    finally:
        gc.callbacks.remove(scope["callback"])
