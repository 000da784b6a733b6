"""RandomOps: the random operations of a stage, each with its own key in place of torch's generator.

A key is found by the module that draws and by the number of its earlier draws in the same forward. Names are not part
of graphs, so that equal layers share one graph: it takes the keys of its draws as one more tensor [draws]. Operations
that torch's checkpoint runs again in the backward draw with the same keys as the first time.

stage    keys [5] ─┬─ [0:2] ─▶ block of layers.0     keys [2] ─┬─ [0] ─▶ dropout of attn
                   ├─ [2:4] ─▶ block of layers.1               └─ [1] ─▶ dropout of mlp
                   └─ [4] ───▶ dropout
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pipegraph.device import Device
from pipegraph.errors import PipegraphError
from pipegraph.torch_private.checkpointing import arguments as torch_arguments
from pipegraph.torch_private.checkpointing import checkpointing, redirecting, takes_distributed

# ---- counter generator -----------------------------------------------------------------------------------------------
# Random operations as pure functions of a key: the same numbers eager and compiled, at once and computed again.
#
# torch's own random operations draw from a generator that each of them moves on, so that what one draws depends on all
# that ran before it. Here an element is a function of its position and of a key, made of operations that every compiler
# of graphs fuses with what reads it.


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
        """Numbers between 0 and 1, both excluded: midpoints of 1 / eps (of the dtype) equal intervals, at most 2³²."""
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


# ---- draws -----------------------------------------------------------------------------------------------------------


LOSS = "(loss)"
"""The name under which a loss draws. No module is called so."""

_seeding = threading.RLock()


class RandomOps:
    """Finds the random operations of a function that calls modules, and replaces them by functions of keys.

    Args:
        root: draws are named by the modules inside it.
        outside: the name of a draw outside all modules.
        key: the key of a draw, by its position among all. None leaves random operations as they are.

    Attributes:
        modules: the name of the module of each draw, in order.
        device: where the first one draws; None before.
    """

    def __init__(self, root: nn.Module, outside: str, key: Callable[[int], Key] | None = None) -> None:
        self.modules: list[str] = []
        self.device: torch.device | None = None
        self._names = {id(module): name for name, module in root.named_modules()}
        self._calls = [outside]
        self._key = key
        self._keys: dict[int, Key] = {}  # by position: operations may run again after other microbatches have drawn
        self._again: int | None = None  # the position of the next draw if operations run again
        self._thread = threading.get_ident()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """A context for the function."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with self._redirected():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self, modules: Sequence[str]) -> slice:
        """Note the draws of a block that the innermost module is now, by their names inside it; return their places."""
        start, outer = self._next, self._calls[-1]
        if self._again is None:
            self.modules += [f"{outer}.{name}" if outer and name else outer or name for name in modules]
        else:
            self._again += len(modules)
        return slice(start, start + len(modules))

    @property
    def _next(self) -> int:
        """The position of the next draw."""
        return len(self.modules) if self._again is None else self._again

    @contextmanager
    def _redirected(self) -> Iterator[None]:
        with redirecting(self._dispatch), checkpointing(self._repeatable):
            yield

    def _repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What a checkpoint that begins now is to run again: with the keys of the draws to come."""
        start = self._next

        def again(*args: Any, **kwargs: Any) -> Any:
            previous_position, self._again = self._again, start
            try:
                with self._redirected():
                    return function(*args, **kwargs)
            finally:
                self._again = previous_position

        return again

    def _enter(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() == self._thread:
            self._calls.append(self._names.get(id(module), self._calls[-1]))

    def _leave(self, module: nn.Module, _: Any, returned: Any) -> None:
        if threading.get_ident() == self._thread:
            self._calls.pop()

    def _dispatch(self, operation: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not is_draw(operation, args, kwargs):
            return operation(*args, **kwargs)
        if takes_distributed(types):  # DTensor draws for the shard of this rank, by another operation
            return NotImplemented
        position = self.take([""]).start
        arguments = torch_arguments(operation, args, kwargs)
        device = _device(arguments)
        self.device = self.device or device
        if self._key is None:
            return operation(*args, **kwargs)
        if position not in self._keys:
            self._keys[position] = self._key(position)
        return _draw(operation, args, kwargs, arguments, self._keys[position], device)


def is_draw(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers with these arguments, from the generator of its device.

    An attention has the tag without a dropout too; and its backward, which repeats the numbers of its forward.
    """
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    arguments = torch_arguments(operation, args, kwargs)
    if arguments.get("generator") is not None or "philox_seed" in arguments:
        return False
    if "dropout_p" in arguments:
        return arguments["dropout_p"] != 0 and operation is not torch.ops.aten._fused_sdp_choice.default
    if "p" in arguments and "train" in arguments:
        return arguments["p"] != 0 and arguments["train"] is not False
    return arguments.get("dropout") != 0  # of an RNN


def _device(arguments: Mapping[str, Any]) -> torch.device:
    """Where an operation draws: the device it is asked for, or that of its arguments."""
    if arguments.get("device") is not None:
        return torch.device(arguments["device"])
    tensors = (tensor.device for tensor in arguments.values() if isinstance(tensor, Tensor))
    return next(tensors, None) or torch.get_default_device()


def _draw(
    operation: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arguments: Mapping[str, Any],
    key: Key,
    device: torch.device,
) -> Any:
    name = operation.overloadpacket.__name__
    function = None if "out" in arguments else function_of(name.removesuffix("_"))
    if function is not None:
        result = function(CounterGenerator(key, device), arguments)
        return arguments["self"].copy_(result) if name.endswith("_") else result
    if isinstance(key, Tensor):
        raise RuntimeError(f"with seed=, what {operation} draws is seeded outside a graph alone{_remedy(name)}")
    # Threads share the generator that is seeded here.
    with _seeding, Device(device).fork_rng():
        torch.manual_seed(key)
        return operation(*args, **kwargs)


def _remedy(name: str) -> str:
    if "attention" not in name:
        return ""
    return ": torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the step has a dropout that can be traced"


def numbered(modules: Sequence[str], position: int) -> tuple[str, int]:
    """The module of a draw, and how many draws it has made before."""
    module = modules[position]
    return module, modules[:position].count(module)


@contextmanager
def refusing_draws() -> Iterator[None]:
    """A context for a backward. Raises PipegraphError for a draw in it: it repeats an unknown draw of the forward."""

    def dispatch(operation: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if is_draw(operation, args, kwargs):
            raise PipegraphError(
                f"a backward draws random numbers ({operation}), and seed= cannot tell which numbers of the "
                "forward they repeat.",
                'torch.utils.checkpoint, or recompute="block", to compute values again.',
            )
        return operation(*args, **kwargs)

    with redirecting(dispatch):
        yield
