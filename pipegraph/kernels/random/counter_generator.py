"""Random operations as pure functions of a key: the same numbers eager and compiled, at once and computed again.

torch's own random operations draw from a generator that each of them moves on, so that what one draws depends on all
that ran before it. Here an element is a function of its position and of a key, made of operations that every compiler
of graphs fuses with what reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Key = Tensor | int
"""An odd whole number of 64 bits: a tensor without dimensions in a graph."""

_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class CounterGenerator:
    """SplitMix64 from the state 0, with the key as its odd step: element i is a mixture of the bits of (i + 1) · key.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014; the mixture is variant
    13 of Stafford. It reads no value more than twice: a compiler that fuses repeats what is read again.
    """

    key: Key
    device: torch.device

    def bits(self, shape: Sequence[int]) -> Tensor:
        """Whole numbers from 0 to 2³² − 1, as int64."""
        key = self.key.to(self.device) if isinstance(self.key, Tensor) else self.key
        places = torch.arange(1, math.prod(shape) + 1, device=self.device).view(list(shape))
        mixed = _shifted_in(places * key, 30) * -0x40A7B892E31B1A47
        mixed = _shifted_in(mixed, 27) * -0x6B2FB644ECCEEE15
        return (mixed >> 32 ^ (mixed >> 63 & 1)) & _LOW

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers between 0 and 1, both excluded: the middles of as many equal parts as the dtype tells apart."""
        digits = min(32, -round(math.log2(torch.finfo(dtype).eps)))
        return ((self.bits(shape) >> (32 - digits)).to(dtype) + 0.5) * 2.0**-digits

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers of the standard normal distribution."""
        wide = dtype if dtype == torch.float64 else torch.float32
        return (torch.erfinv(2 * self.uniform(shape, wide) - 1) * math.sqrt(2)).to(dtype)

    def exponential(self, shape: Sequence[int]) -> Tensor:
        """Numbers of the exponential distribution of rate 1."""
        return -torch.log(self.uniform(shape))

    def integers(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Whole numbers from `low` to `high` − 1, as int64. There are at most 2³¹ of them."""
        return low + ((self.bits(shape) * min(high - low, 2**31)) >> 32)


def _shifted_in(x: Tensor, places: int) -> Tensor:
    """Exclusive or of 64 bits with themselves shifted right, without the sign that torch shifts in."""
    return x ^ ((x >> places) & ((1 << (64 - places)) - 1))


Arguments = Mapping[str, Any]
"""Of an operation, by the names in its schema."""


def function_of(name: str) -> Callable[[CounterGenerator, Arguments], Any] | None:
    """Return what computes an ATen operation from a key, by its name without the ``_`` of one that writes in place.

    None for a distribution that is not here, such as that of Poisson.
    """
    return _FUNCTIONS.get(name)


def _native_dropout(numbers: CounterGenerator, arguments: Arguments) -> tuple[Tensor, Tensor]:
    x, p = arguments["input"], arguments["p"]
    mask = numbers.uniform(x.shape) < 1 - p
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _bernoulli(numbers: CounterGenerator, arguments: Arguments) -> Tensor:
    x = arguments["self"]
    p = arguments.get("p", x)
    return (numbers.uniform(x.shape) < (p.float() if isinstance(p, Tensor) else p)).to(x.dtype)


def _rand(numbers: CounterGenerator, arguments: Arguments) -> Tensor:
    return numbers.uniform(*_new(arguments))


def _randn(numbers: CounterGenerator, arguments: Arguments) -> Tensor:
    return numbers.normal(*_new(arguments))


def _randint(numbers: CounterGenerator, arguments: Arguments) -> Tensor:
    shape, _ = _new(arguments)
    default = arguments["self"].dtype if "self" in arguments else torch.int64
    return numbers.integers(shape, arguments.get("low", 0), arguments["high"]).to(arguments.get("dtype") or default)


def _randperm(numbers: CounterGenerator, arguments: Arguments) -> Tensor:
    return torch.argsort(numbers.bits([arguments["n"]])).to(arguments.get("dtype") or torch.int64)


def _new(arguments: Arguments) -> tuple[Sequence[int], torch.dtype]:
    """The shape and dtype of a new tensor."""
    like = arguments.get("self")
    shape = arguments["size"] if like is None else like.shape
    return shape, arguments.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)


def _uniform(numbers: CounterGenerator, arguments: Arguments) -> Tensor:
    x, low, high = arguments["self"], arguments["from"], arguments["to"]
    return numbers.uniform(x.shape, x.dtype) * (high - low) + low


def _normal(numbers: CounterGenerator, arguments: Arguments) -> Tensor:
    """All of `normal_(x, mean, std)`, `normal(mean, std)` with tensors, and `normal(mean, std, size)`."""
    mean, std = arguments["mean"], arguments["std"]
    likes = [tensor for tensor in (arguments.get("self"), mean, std) if isinstance(tensor, Tensor)]
    if not likes:
        return numbers.normal(*_new(arguments)) * std + mean
    shape = likes[0].shape if "self" in arguments else torch.broadcast_shapes(*(tensor.shape for tensor in likes))
    return numbers.normal(shape, likes[0].dtype) * std + mean


def _random(numbers: CounterGenerator, arguments: Arguments) -> Tensor:
    dtype = arguments["self"].dtype
    most = 2 ** (1 - round(math.log2(torch.finfo(dtype).eps))) if dtype.is_floating_point else _largest(dtype)
    low, high = arguments.get("from", 0), arguments.get("to")
    return numbers.integers(arguments["self"].shape, low, most + 1 if high is None else high)


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _multinomial(numbers: CounterGenerator, arguments: Arguments) -> Tensor:
    """With replacement by the inverse of the sums, without it by racing exponentials, as torch does."""
    weights, count = arguments["self"].float(), arguments["num_samples"]
    if not arguments["replacement"]:
        return torch.topk(weights / numbers.exponential(weights.shape), count).indices
    sums = weights.cumsum(-1)
    samples = numbers.uniform([*weights.shape[:-1], count]) * sums[..., -1:]
    return torch.searchsorted(sums, samples, right=True).clamp(max=weights.shape[-1] - 1)


_FUNCTIONS: dict[str, Callable[[CounterGenerator, Arguments], Any]] = {
    "native_dropout": _native_dropout,
    "bernoulli": _bernoulli,
    "rand": _rand,
    "rand_like": _rand,
    "randn": _randn,
    "randn_like": _randn,
    "randint": _randint,
    "randint_like": _randint,
    "randperm": _randperm,
    "uniform": _uniform,
    "normal": _normal,
    "normal_functional": _normal,
    "random": _random,
    "multinomial": _multinomial,
    "exponential": lambda numbers, args: numbers.exponential(args["self"].shape) / args["lambd"],
    "log_normal": lambda numbers, args: torch.exp(numbers.normal(args["self"].shape) * args["std"] + args["mean"]),
    "cauchy": lambda numbers, args: (
        torch.tan(math.pi * (numbers.uniform(args["self"].shape) - 0.5)) * args["sigma"] + args["median"]
    ),
    "geometric": lambda numbers, args: torch.ceil(
        torch.log(numbers.uniform(args["self"].shape)) / math.log1p(-args["p"])
    ),
}
