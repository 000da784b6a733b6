"""What this machine attains, timed: products of matrices, convolutions, attention, and loops over elements."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pipegraph.cost.hardware import OTHER_OPERATIONS, SizeTable, Values
from pipegraph.cost.roofline.graph_price import trace_aten
from pipegraph.kernels.compilers import compile_graphs
from pipegraph.torch_private.cpp_inductor import compiler_is_missing
from pipegraph.torch_private.tracing import Run, boxed

# ---- sizes -----------------------------------------------------------------------------------------------------------
# The sizes at which kernels are timed on each kind of device, up to those of a large layer.


Axis = tuple[int, ...]
Axes = Mapping[str, Axis]

_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True)
class MeasuredSizes:
    """Sizes along the axes of the tables of a profile.

    Attributes:
        matrices: m, n and k of a product.
        batched: the same of products that are computed together.
        attention: tokens of a row, and elements of a head.
        convolution: m, pixels of all images; n, channels that are computed; k, elements of a window of all channels.
        batch: matrices, or heads, that are computed together.
        images: of a convolution.
        streamed: bytes that a sum of two tensors reads and writes.
        sample: seconds; of shorter runs several make one sample, or the clock would be measured.
    """

    matrices: Axes
    batched: Axes
    attention: Axes
    convolution: Axes
    batch: int
    images: int
    streamed: Axis
    sample: float


def _products(*sizes: int) -> Axes:
    return dict.fromkeys("mnk", sizes)


_CPU: Final = MeasuredSizes(
    matrices=_products(16, 128, 1024),
    batched=_products(16, 128),
    attention={"length": (32, 128, 512), "head_dim": (32, 128)},
    # Two images of 8 × 8 to 64 × 64 pixels; windows of 3 × 3 over 3, 32 and 256 channels.
    convolution={"m": (128, 1152, 8192), "n": (16, 128), "k": (27, 288, 2304)},
    batch=16,
    images=2,
    streamed=tuple(3 * size for size in (4 * _KIB, 32 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)),
    sample=50e-6,
)
_GPU: Final = MeasuredSizes(
    matrices=_products(128, 512, 2048, 8192),
    batched=_products(64, 512, 2048),
    attention={"length": (256, 1024, 4096), "head_dim": (64, 128)},
    # Sixteen images of 16 × 16 to 128 × 128 pixels; windows of 3 × 3 over 3, 64 and 256 channels.
    convolution={"m": (4096, 65536, 262144), "n": (64, 256), "k": (27, 576, 2304)},
    batch=32,
    images=16,
    streamed=tuple(3 * size for size in (64 * _KIB, _MIB, 16 * _MIB, 64 * _MIB, 512 * _MIB)),
    sample=1e-3,  # to wait for a GPU takes the host some 20 µs
)


def sizes_on(device: str) -> MeasuredSizes:
    """The sizes for a kind of device: cpu, or a GPU."""
    return _CPU if device == "cpu" else _GPU


# ---- rates -----------------------------------------------------------------------------------------------------------


_FEWEST, _MOST = 5, 30  # samples
_WINDOW = 9  # elements of a convolution's window

_TOO_SLOW = 8.0

_MIB = 2**20
# From 32 MiB on, glibc gives what is freed back to the system unless `keep_freed_memory` holds (mallopt(3)).
_NEW = (1 * _MIB, 16 * _MIB, 31 * _MIB, 32 * _MIB, 128 * _MIB)
_SHAPE = 256, 256  # of what a function is measured on: small enough for the cache of a core
_MANY = 1024, 1024  # rows and columns, as of a layer's results: steps from row to row are steps from page to page
_CHAIN = 16

Function = Callable[..., Tensor]


@dataclass
class Stopwatch:
    """Times runs on a device, each for about ``budget`` seconds. ``spreads`` has the noise of each measurement.

    Before each run ``footprint`` bytes of other data go through the caches, as in a step, where a kernel runs once
    between others; with none, a run finds in the caches what it left there.
    """

    device: torch.device
    budget: float = 0.05
    footprint: int = 0
    spreads: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The time of a core leaves out what other processes take of it, and knows nothing of other threads or a GPU.
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if alone else time.perf_counter
        self._filler = torch.ones(self.footprint // 4, device=self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of one run."""
        run()
        once = max(self._sample(run, 1), 1e-9)
        together = 1 if self.footprint else max(1, round(self.sizes.sample / once))
        count = min(max(round(self.budget / (once * together)), _FEWEST), _MOST)
        samples = [self._sample(run, together) / together for _ in range(count)]
        low, median, high = statistics.quantiles(samples, n=4)
        self.spreads.append((high - low) / median)
        return median

    @property
    def sizes(self) -> MeasuredSizes:
        """The sizes at which kernels are timed on the device."""
        return sizes_on(self.device.type)

    @property
    def noise(self) -> float:
        """The usual distance between the quartiles, as part of the median."""
        return statistics.median(self.spreads) if self.spreads else 0.0

    def _sample(self, run: Callable[[], object], count: int) -> float:
        if self.footprint:
            self._filler.sum()
        self._wait()
        started = self._clock()
        for _ in range(count):
            run()
        self._wait()
        return self._clock() - started

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def measure_compute_rates(stopwatch: Stopwatch, dtype: torch.dtype) -> dict[str, SizeTable]:
    """Kind of kernel → floating-point operations per second, over its sizes; nothing for a dtype that the device has
    no operations for, and which takes many times as long as float32.
    """
    sizes = stopwatch.sizes
    if stopwatch.seconds(_probe(stopwatch, dtype)) > _TOO_SLOW * stopwatch.seconds(_probe(stopwatch, torch.float32)):
        return {}

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=stopwatch.device)

    def matmul(m: int, n: int, k: int) -> list[float]:
        first, second = random(m, k), random(k, n)
        return [2 * m * n * k / stopwatch.seconds(lambda: torch.mm(first, second))]

    def batched(m: int, n: int, k: int) -> list[float]:
        first, second = random(sizes.batch, m, k), random(sizes.batch, k, n)
        return [2 * sizes.batch * m * n * k / stopwatch.seconds(lambda: torch.bmm(first, second))]

    def attention(length: int, head_dim: int) -> list[float]:
        inputs = [random(1, sizes.batch, length, head_dim) for _ in range(3)]
        flops = 4 * sizes.batch * length * length * head_dim
        # Backward, the scores are computed again, and four more products.
        return _rates(stopwatch, F.scaled_dot_product_attention, inputs, flops, 2.5 * flops)

    def convolution(m: int, n: int, k: int) -> list[float]:
        side = round((m / sizes.images) ** 0.5)
        inputs = [random(sizes.images, k // _WINDOW, side, side), random(n, k // _WINDOW, 3, 3)]
        flops = 2 * m * n * k
        return _rates(stopwatch, lambda image, weight: F.conv2d(image, weight, padding=1), inputs, flops, 2 * flops)

    return (
        _tables(sizes.matrices, matmul, "matmul")
        | _tables(sizes.batched, batched, "batched_matmul")
        | _tables(sizes.attention, attention, "attention", "attention_backward")
        | _tables(sizes.convolution, convolution, "convolution", "convolution_backward")
    )


def _probe(stopwatch: Stopwatch, dtype: torch.dtype) -> Callable[[], Tensor]:
    matrix = torch.ones(128, 128, dtype=dtype, device=stopwatch.device)
    return lambda: torch.mm(matrix, matrix)


def _rates(
    stopwatch: Stopwatch, function: Callable[..., Tensor], inputs: Sequence[Tensor], forward: float, backward: float
) -> list[float]:
    """The rates of a forward and a backward with these numbers of operations."""
    with torch.no_grad():
        first = stopwatch.seconds(lambda: function(*inputs))
    result = function(*(tensor.requires_grad_() for tensor in inputs))
    gradient = torch.ones_like(result)
    second = stopwatch.seconds(lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True))
    return [forward / first, backward / second]


def _tables(axes: Axes, measure: Callable[..., list[float]], *kinds: str) -> dict[str, SizeTable]:
    """What is measured at each combination of sizes: one table for each kind."""
    measurements = {sizes: measure(*sizes) for sizes in itertools.product(*axes.values())}
    return {
        kind: SizeTable(
            {name: tuple(map(float, sizes)) for name, sizes in axes.items()},
            _nested(list(axes.values()), lambda *sizes, at=index: measurements[sizes][at]),
        )
        for index, kind in enumerate(kinds)
    }


def _nested(axes: Sequence[Sequence[int]], figure: Callable[..., float], *sizes: int) -> Values:
    if not axes:
        return figure(*sizes)
    return tuple(_nested(axes[1:], figure, *sizes, size) for size in axes[0])


def measure_bandwidth(stopwatch: Stopwatch) -> SizeTable:
    """Bytes per second of a sum of two tensors, over the bytes it reads and writes: caches, and memory."""

    def rate(size: int) -> float:
        first, second, result = torch.ones(3, size // 12, device=stopwatch.device).unbind()
        return size / stopwatch.seconds(lambda: torch.add(first, second, out=result))

    sizes = stopwatch.sizes.streamed
    return SizeTable({"bytes": tuple(map(float, sizes))}, tuple(map(rate, sizes)))


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
    """Elements per second of functions in a fused kernel, beyond what its bytes take; none on a GPU, which computes
    them while it waits for memory."""
    if stopwatch.device.type != "cpu":
        return {}
    cases = _cases(stopwatch.device)
    runs = compiled([(case.function, case.inputs) for case in cases.values()])
    without = compiled([(case.without, case.inputs) for case in cases.values()])
    rates = {}
    for (name, case), run, baseline_run in zip(cases.items(), runs, without, strict=True):
        beyond = stopwatch.seconds(run) - stopwatch.seconds(baseline_run)
        if beyond > 0:
            rates[name] = case.count * case.inputs[0].numel() / beyond
    return rates


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
        OTHER_OPERATIONS: _Case(_chain_of_products_and_sums, (x,), count=_CHAIN),
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
    """Functions with their arguments, compiled by Inductor as in a stage; not compiled if there is no compiler."""
    distinct = list(dict.fromkeys((function, tuple(inputs)) for function, inputs in functions))
    modules = [trace_aten(function, inputs) for function, inputs in distinct]
    compiled_runs: Sequence[Run | Exception] = []
    if compiler_is_missing() is None:
        compiled_runs = compile_graphs(modules)
    runs = {
        key: boxed(module) if run is None or isinstance(run, Exception) else run
        for key, module, run in itertools.zip_longest(distinct, modules, compiled_runs)
    }
    return [partial(_call, runs[function, tuple(inputs)], inputs) for function, inputs in functions]


def _call(run: Run, inputs: Sequence[Tensor]) -> object:
    return run(list(inputs))
