"""Measure what the loops of compiled kernels attain: bandwidth, functions, and what starting one takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from pipegraph.cost.aten_graph import trace_aten
from pipegraph.cost.calibration.stopwatch import Stopwatch
from pipegraph.cost.hardware.profile import OTHER
from pipegraph.cost.hardware.size_table import SizeTable
from pipegraph.kernels import internals
from pipegraph.kernels.compilers import compile_graphs
from pipegraph.kernels.internals import Run

_KIB, _MIB = 2**10, 2**20
_STREAMED = tuple(3 * size for size in (4 * _KIB, 32 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB))
# From 32 MiB on, glibc gives what is freed back to the system: its threshold adapts up to there (mallopt(3)).
_NEW = (1 * _MIB, 16 * _MIB, 31 * _MIB, 32 * _MIB, 128 * _MIB)
_SHAPE = 256, 256  # of what a function is measured on: small enough for the cache of a core
_MANY = 1024, 1024  # rows and columns, as of a layer's results: steps from row to row are steps from page to page
_CHAIN = 16

Function = Callable[..., Tensor]


def measure_bandwidth(stopwatch: Stopwatch) -> SizeTable:
    """Bytes per second of a sum of two tensors, over the bytes it reads and writes: caches, and memory."""

    def rate(size: int) -> float:
        one, other, result = torch.ones(3, size // 12, device=stopwatch.device).unbind()
        return size / stopwatch.seconds(lambda: torch.add(one, other, out=result))

    return SizeTable({"bytes": tuple(map(float, _STREAMED))}, tuple(map(rate, _STREAMED)))


def measure_first_touch(stopwatch: Stopwatch) -> SizeTable | None:
    """Bytes per second at which the memory of a new tensor comes, over its bytes; None on devices that torch keeps
    memory of."""
    if stopwatch.device.type != "cpu":
        return None

    def rate(size: int) -> float:
        result = torch.empty(size, dtype=torch.uint8)
        new = stopwatch.seconds(lambda: torch.empty(size, dtype=torch.uint8).fill_(1))
        old = stopwatch.seconds(lambda: result.fill_(1))
        return size / max(new - old, 0.01 * old)  # within the noise

    # The largest first: what smaller ones leave in the heap would hold the smallest of those that go back.
    rates = {size: rate(size) for size in reversed(_NEW)}
    return SizeTable({"bytes": tuple(map(float, _NEW))}, tuple(rates[size] for size in _NEW))


def _double(x: Tensor) -> Tensor:
    return x * 2


@dataclass(frozen=True)
class _Case:
    """A function of `inputs`, in which what is measured stands `count` times, and the same `without` it."""

    function: Function
    inputs: tuple[Tensor, ...]
    without: Function = _double
    count: int = 1


def measure_element_rates(stopwatch: Stopwatch) -> dict[str, float]:
    """Elements per second of functions in a fused kernel, beyond what its bytes take."""
    cases = _cases(stopwatch.device)
    whole = compiled([(case.function, case.inputs) for case in cases.values()])
    without = compiled([(case.without, case.inputs) for case in cases.values()])
    found = {}
    for (name, case), run, other in zip(cases.items(), whole, without, strict=True):
        beyond = stopwatch.seconds(run) - stopwatch.seconds(other)
        if beyond > 0:
            found[name] = case.count * case.inputs[0].numel() / beyond
    return found


def _cases(device: torch.device) -> dict[str, _Case]:
    generator = torch.Generator(device).manual_seed(0)
    normal = torch.randn(_SHAPE, device=device, generator=generator)
    x = normal.abs() + 0.1
    many = torch.ones(_MANY, device=device)
    rows = torch.randint(_SHAPE[0], _SHAPE[:1], device=device, generator=generator)
    functions: dict[str, Function] = {
        "exp": torch.exp,
        "log": torch.log,
        "sin": torch.sin,
        "tanh": torch.tanh,
        "erf": torch.erf,
        "sigmoid": torch.sigmoid,
        "rsqrt": torch.rsqrt,
        "pow": lambda x: torch.pow(x, 1.3),
        "div": lambda x: 1.5 / x,
        "random": torch.rand_like,
    }
    return {name: _Case(function, (x,)) for name, function in functions.items()} | {
        OTHER: _Case(_chain_of_products_and_sums, (x,), count=_CHAIN),
        "write bool": _Case(lambda x: x <= 0, (normal,)),
        "read bool": _Case(lambda mask, x: torch.where(mask, x, 0), (normal > 0, x), without=lambda mask, x: x * 2),
        # What a row is reduced to is needed before the rest of the row's loop, which reads it again.
        "sum": _Case(lambda x: x * x.sum(-1, keepdim=True), (x,)),
        "var_mean": _Case(lambda x: F.layer_norm(x, _SHAPE[1:]), (x,)),
        "sum across": _Case(lambda x: x.sum(0), (many,), without=lambda x: x.sum(1)),
        "window": _Case(lambda x: F.max_pool2d(x[None, None], 2), (x,), without=lambda x: x[::2, ::2] * 2),
        "scatter": _Case(_scatter, (x, rows), without=lambda x, rows: x * 2),
    }


def _chain_of_products_and_sums(x: Tensor) -> Tensor:
    return reduce(lambda y, index: (y + index) * x, range(1, 1 + _CHAIN // 2), x)


def _scatter(x: Tensor, rows: Tensor) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(x, rows, _SHAPE[0], -1, False)


def measure_kernel_overhead(stopwatch: Stopwatch) -> float:
    """What one more kernel in a compiled graph takes, whatever it does."""
    x = torch.ones(8, 8, device=stopwatch.device)

    def chain(length: int) -> Function:
        return lambda x: reduce(lambda y, _: torch.mm(y, x) + 1, range(length), x)

    short, long = compiled([(chain(2), (x,)), (chain(2 + _CHAIN), (x,))])
    beyond = stopwatch.seconds(long) - stopwatch.seconds(short)
    return max(beyond, 0.0) / (2 * _CHAIN)  # a product and a sum


def compiled(functions: Sequence[tuple[Function, Sequence[Tensor]]]) -> list[Callable[[], object]]:
    """Functions with their arguments, compiled by Inductor as a stage's are; as they are where it has no compiler."""
    distinct = list(dict.fromkeys((function, tuple(inputs)) for function, inputs in functions))
    modules = [trace_aten(function, inputs) for function, inputs in distinct]
    made: Sequence[Run | Exception] = []
    if internals.compiler_is_missing() is None:
        made = compile_graphs(modules)
    runs = {
        each: internals.boxed(module) if run is None or isinstance(run, Exception) else run
        for each, module, run in itertools.zip_longest(distinct, modules, made)
    }
    return [partial(_call, runs[function, tuple(inputs)], inputs) for function, inputs in functions]


def _call(run: Run, inputs: Sequence[Tensor]) -> object:
    return run(list(inputs))
