"""What a graph costs: which kernels it becomes, their floating-point operations and their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

from pipegraph.cost.hardware import Hardware, Link, Links, SizeTable
from pipegraph.cost.roofline.fused_kernels import fused_kernels
from pipegraph.cost.roofline.graph_price import GraphPrice, price_graph, trace_aten
from pipegraph.kernels import make
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.graphs.block_operation import OPERATION

# 1 TFLOP/s, 100 GB/s: seconds can be told in the head.
PLAIN = Hardware(
    name="plain",
    device="a model of one",
    memory_bytes=2**30,
    peak_flops={"float32": 2e12, "bfloat16": 4e12},
    attained_flops={"matmul": {"any": SizeTable({}, 0.5)}},
    memory_bandwidth=100e9,
    attained_bandwidth=SizeTable({}, 1.0),
    kernel_floor=0.0,
    links=Links(1, Link(0.0, 1e9)),
)
X = torch.empty(64, 256)
BYTES = 4 * X.numel()


def price(function: Callable[..., Any], *inputs: Tensor, hardware: Hardware = PLAIN, **options: Any) -> GraphPrice:
    return price_graph(trace_aten(function, inputs), hardware, **options)


def count(function: Callable[..., Any], *inputs: Tensor) -> int:
    return len(fused_kernels(trace_aten(function, inputs).graph))


def test_a_product_of_matrices_is_bound_by_its_operations() -> None:
    a, b = torch.empty(512, 1024), torch.empty(1024, 2048)
    cost = price(torch.mm, a, b)
    assert cost.flops == 2 * 512 * 1024 * 2048
    assert cost.bytes == 4 * (512 * 1024 + 1024 * 2048 + 512 * 2048)
    assert cost.seconds == pytest.approx(cost.flops / 1e12)
    assert cost.uncounted == ()


def test_or_by_its_bytes() -> None:
    a, b = torch.empty(1, 1024), torch.empty(1024, 1024)
    cost = price(torch.mm, a, b)
    assert cost.seconds == pytest.approx(cost.bytes / 100e9)


def test_a_dtype_has_its_own_peak_and_an_unknown_one_the_lowest() -> None:
    a = torch.empty(1024, 1024)
    assert price(torch.mm, a.bfloat16(), a.bfloat16()).seconds == pytest.approx(2 * 1024**3 / 2e12)
    assert price(torch.mm, a.double(), a.double()).seconds == pytest.approx(2 * 1024**3 / 1e12)


def test_float32_with_less_precision_is_another_dtype() -> None:
    hardware = structs.replace(PLAIN, peak_flops={"float32": 2e12, "tfloat32": 20e12})
    a = torch.empty(1024, 1024)
    torch.set_float32_matmul_precision("high")
    try:
        assert price(torch.mm, a, a, hardware=hardware).seconds == pytest.approx(2 * 1024**3 / 10e12)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_neighbours_share_a_kernel_that_reads_and_writes_once() -> None:
    cost = price(lambda x, y: ((x + y) * x).exp() - y, X, X)
    assert count(lambda x, y: ((x + y) * x).exp() - y, X, X) == 1
    assert cost.bytes == 3 * BYTES
    assert cost.seconds == pytest.approx(3 * BYTES / 100e9)


def test_a_reduction_and_what_follows_share_one() -> None:
    assert count(lambda x: x.softmax(-1), X) == 1
    assert price(lambda x: x.softmax(-1), X).bytes == 2 * BYTES
    assert count(lambda x: F.layer_norm(x, (256,)), X) == 1


def test_reductions_along_rows_and_along_columns_do_not() -> None:
    assert count(lambda x: x.sum(0).sum() + x.sum(1).sum(), X) == 2 + 2


def test_views_and_constants_are_free() -> None:
    assert price(lambda x: x.view(256, 64).t(), X) == GraphPrice()
    assert price(lambda x: x.t() + torch.full((256, 64), 2.0), X).bytes == 2 * BYTES


def test_a_constant_that_is_returned_is_written() -> None:
    assert price(lambda x: torch.zeros(1000), X).bytes == 4000


def test_a_part_is_read_as_far_as_it_is_used() -> None:
    assert price(lambda x: x[:16] * 2, X).bytes == 2 * BYTES // 4
    assert price(lambda x, row: x + row.expand(64, 256), X, torch.empty(1, 256)).bytes == 2 * BYTES + 4 * 256


def test_a_gather_reads_what_it_returns_and_not_the_table() -> None:
    table, rows = torch.empty(50_000, 256), torch.zeros(64, dtype=torch.int64)
    assert price(lambda table, rows: F.embedding(rows, table), table, rows).bytes == 2 * BYTES + 8 * 64


def test_a_scatter_makes_what_it_writes_into() -> None:
    def gradient(x: Tensor, rows: Tensor) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(x, rows, 50_000, -1, False)

    cost = price(gradient, X, torch.zeros(64, dtype=torch.int64))
    assert cost.bytes == pytest.approx(4 * 50_000 * 256 + 3 * BYTES, rel=0.01)


def test_two_kernels_never_wait_for_each_other() -> None:
    """x + 1 and its product's sum could share a loop, but for the product between them."""
    a = torch.empty(64, 64)
    assert count(lambda a: torch.mm(a + 1, a) + (a + 1), a) == 3


def test_a_loop_runs_later_if_nothing_waits_for_it() -> None:
    """exp is computed in the loop after the second product, and not written before it."""
    a = torch.empty(64, 64)
    cost = price(lambda a, b: torch.mm(a, b).exp() * torch.mm(b, a), a, a)
    assert count(lambda a, b: torch.mm(a, b).exp() * torch.mm(b, a), a, a) == 3
    assert cost.bytes == (3 + 3 + 3) * 4 * 64 * 64
    assert count(lambda a: torch.mm(torch.mm(a, a).exp(), a) * torch.mm(a, a).exp(), a) == 5


def test_every_kernel_takes_its_floor_or_adds_its_overhead() -> None:
    a = torch.empty(4, 4)
    floor = structs.replace(PLAIN, kernel_floor=7e-6)
    assert price(lambda a: torch.mm(a.exp(), a), a, hardware=floor).seconds == pytest.approx(14e-6)
    added = structs.replace(PLAIN, kernel_overhead=1e-3)
    plain = price(lambda a: torch.mm(a.exp(), a), a).seconds
    assert price(lambda a: torch.mm(a.exp(), a), a, hardware=added).seconds == pytest.approx(plain + 2e-3)


def test_functions_take_time_beyond_their_bytes() -> None:
    hardware = structs.replace(PLAIN, element_rates={"tanh": 1e9, "write bool": 1e8, "other": 1e10})
    plain = 2 * BYTES / 100e9
    assert price(torch.tanh, X, hardware=hardware).seconds == pytest.approx(plain + X.numel() / 1e9)
    assert price(torch.neg, X, hardware=hardware).seconds == pytest.approx(plain + X.numel() / 1e10)
    cost = price(lambda x: x > 0, X, hardware=hardware)
    assert cost.seconds == pytest.approx(cost.bytes / 100e9 + X.numel() / 1e10 + X.numel() / 1e8)


def test_new_memory_takes_time_where_the_system_has_to_provide_it() -> None:
    hardware = structs.replace(PLAIN, first_touch=SizeTable({"bytes": (1e6, 2e6)}, (1e15, 1e9)))
    large = torch.empty(1024, 1024)
    assert price(torch.neg, X, hardware=hardware).seconds == pytest.approx(price(torch.neg, X).seconds, rel=1e-3)
    assert price(torch.neg, large, hardware=hardware).seconds == pytest.approx(
        price(torch.neg, large).seconds + 4.2e-3, 0.01
    )


def test_what_was_just_written_is_read_faster_than_what_was_long_ago() -> None:
    bandwidth = SizeTable({"footprint": (1e3, 1e9)}, (1.0, 0.1))
    hardware = structs.replace(PLAIN, attained_bandwidth=bandwidth)
    alone = price(torch.neg, X, hardware=hardware, footprint=1)
    around = price(torch.neg, X, hardware=hardware, footprint=10**9)
    assert around.seconds == pytest.approx(10 * alone.seconds)
    # The second kernel finds what the first has written, whatever else the rank does in between.
    chain = price(lambda x: x.sum(1).sum(), X, hardware=hardware, footprint=10**9)
    assert chain.seconds == pytest.approx((BYTES + 256) / 10e9 + (256 + 4) / 100e9, rel=0.01)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)[0]


def test_attention_is_counted_on_a_cpu_as_well_and_half_of_it_done_if_causal() -> None:
    q = torch.empty(2, 8, 1024, 64)
    flops = 4 * 2 * 8 * 1024 * 1024 * 64
    full, causal = (price(lambda *qkv, masked=masked: attention(*qkv, masked), q, q, q) for masked in (False, True))
    assert (full.flops, causal.flops) == (flops, flops)
    assert causal.seconds == pytest.approx(full.seconds * (0.5 + 0.5 / 1024))


@pytest.mark.parametrize("groups", [1, 4, 64])
def test_a_convolution_and_its_backward(groups: int) -> None:
    images, weight = torch.empty(2, 64, 16, 16), torch.empty(64, 64 // groups, 3, 3)
    flops = 2 * images.numel() * 64 // groups * 9
    assert price(lambda x, w: F.conv2d(x, w, padding=1, groups=groups), images, weight).flops == flops

    def backward(gradient: Tensor, x: Tensor, w: Tensor, mask: list[bool]) -> Any:
        arguments = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, mask)
        return next(
            output for output in torch.ops.aten.convolution_backward(gradient, x, w, *arguments) if output is not None
        )

    for mask in ([True, True, False], [False, True, False]):
        cost = price(lambda *tensors, mask=mask: backward(*tensors, mask), images, images, weight)
        assert cost.flops == flops * sum(mask)


def test_a_transposed_convolution() -> None:
    images, weight = torch.empty(2, 32, 8, 8), torch.empty(32, 16, 2, 2)
    hardware = structs.replace(PLAIN, attained_flops={"matmul": {"any": SizeTable({"n": (1.0, 64.0)}, (0.5, 0.25))}})
    cost = price(lambda x, w: F.conv_transpose2d(x, w, stride=2), images, weight, hardware=hardware)
    assert cost.flops == 2 * 2 * 8 * 8 * 32 * 16 * 4
    assert cost.seconds == pytest.approx(cost.flops / 0.5e12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_for_each_expert_and_its_backward(dtype: torch.dtype) -> None:
    """Of 32 rows each goes to one of 4 experts; the result is [32, 64]."""
    rows, experts = torch.empty(32, 16, dtype=dtype), torch.empty(4, 16, 64, dtype=dtype)
    ends, gradient = torch.tensor([8, 8, 24, 32], dtype=torch.int32), torch.empty(32, 64, dtype=dtype)
    product = torch.nn.functional.grouped_mm
    for mat_a, mat_b in ((rows, experts), (gradient, experts.mT), (rows.mT, gradient), (experts.mT, rows.mT)):
        cost = price(lambda a, b, ends: product(a, b, offs=ends), mat_a, mat_b, ends)
        assert cost.flops == 2 * 32 * 16 * 64 and cost.uncounted == ()


def test_a_reduction_of_a_single_number() -> None:
    number = torch.empty(())
    for reduced in (lambda x: x.sum(0), lambda x: x.softmax(0), lambda x: torch.amax(x, 0)):
        assert price(reduced, number).flops == 0


def test_what_may_compute_a_lot_is_named() -> None:
    cost = price(lambda x: torch.linalg.svd(x)[1] + torch.sort(x[0])[0][:64], X)
    assert cost.uncounted == ("_linalg_svd",)
    assert cost.flops == 0
    assert cost.bytes > BYTES


def test_prices_add_up() -> None:
    total = GraphPrice(1.0, 2, 3, ("b",)) + GraphPrice(1.0, 2, 3, ("a", "b"))
    assert total == GraphPrice(2.0, 4, 6, ("a", "b"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def derivative_of(stage: nn.Module, input_gradient: bool = True) -> DividedFunction:
    kernels = make("eager", stage, (input_gradient,), (True,))
    kernels.forward((torch.zeros(16, 32),))
    (variant,) = kernels.variants  # type: ignore[attr-defined]
    return variant.divided


def price_part(derivative: DividedFunction, kind: str) -> GraphPrice:
    return price_graph(derivative.graph(kind, derivative.full_mask).module, PLAIN, footprint=1)


FORWARD = 2 * 2 * 16 * 32 * 64  # operations of one block


def test_calls_of_blocks_cost_what_the_blocks_do() -> None:
    three, single = derivative_of(nn.Sequential(Block(), Block(), Block())), derivative_of(Block())
    assert three.forward.module.graph.find_nodes(op="call_function", target=OPERATION)
    assert [price_part(three, kind).flops / FORWARD for kind in "FIWB"] == [3, 3, 3, 6]
    assert price_part(three, "F").seconds == pytest.approx(3 * price_part(single, "F").seconds)


def test_both_halves_of_a_block_in_one_graph_run_as_its_whole_backward() -> None:
    """In the first stage, whose input has no gradient: what I and W of the blocks share is computed once."""
    first, block = derivative_of(nn.Sequential(Block(), Block()), input_gradient=False), derivative_of(Block())
    cost, whole_cost = price_part(first, "W"), price_part(block, "B")
    assert cost.bytes < 2 * (price_part(block, "I").bytes + price_part(block, "W").bytes)
    assert cost.bytes == pytest.approx(2 * whole_cost.bytes, rel=0.15)
