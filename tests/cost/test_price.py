"""What segments and stages cost: by hand for a linear layer and a small transformer layer, and how prices add up."""

from __future__ import annotations

import warnings
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.cost import price as pricing
from pipegraph.cost.price import price
from pipegraph.cost.segments import distinct_blocks
from pipegraph.graph.captured import Captured
from tests.cost.models import model
from tests.messages import warned
from tests.planner.machine import MACHINE

ROWS = 16


def linear(*widths: int, bias: bool = False) -> Captured:
    stack = nn.Sequential(*(nn.Linear(fan_in, fan_out, bias) for fan_in, fan_out in pairwise(widths)))
    return pipegraph.capture(stack, (torch.randn(ROWS, widths[0]),))


def test_a_linear_layer_by_hand() -> None:
    first, middle, last = price(linear(32, 64, 48, 8), hardware=MACHINE, recompute="none").costs
    assert (first.flops, middle.flops, last.flops) == (2 * ROWS * 32 * 64, 2 * ROWS * 64 * 48, 2 * ROWS * 48 * 8)
    assert [cost.parameter_bytes for cost in (first, middle, last)] == [4 * 32 * 64, 4 * 64 * 48, 4 * 48 * 8]
    assert (first.boundary_bytes, middle.boundary_bytes, last.boundary_bytes) == (4 * ROWS * 64, 4 * ROWS * 48, 0)
    # W needs the input: the caller holds the model's; the loss needs the outputs.
    assert (first.saved_bytes, middle.saved_bytes, last.saved_bytes) == (0, 4 * ROWS * 64, 4 * ROWS * (48 + 8))
    assert middle.forward == pytest.approx(middle.flops / 1e12)
    assert (middle.input_grad, middle.weight_grad) == (pytest.approx(middle.forward), pytest.approx(middle.forward))
    assert (first.input_grad, first.weight_grad) == (0, pytest.approx(first.forward))


def test_a_transformer_layer_by_hand() -> None:
    tokens, width, inner, heads, size = 2 * 5, 16, 32, 2, 8
    priced = price(model("decoder"), recompute="none")
    layer = priced.stage(1, 4)
    products = 2 * tokens * width * (3 * width + width + 2 * inner)
    assert layer.flops == products + 2 * 2 * (2 * heads * 5 * 5 * size)  # scores and their products with the values
    assert layer.parameter_bytes == 4 * (width * (3 * width + width + 2 * inner) + 4 * width)
    assert layer.boundary_bytes == 4 * tokens * width
    saved_numbers = {
        "norms: the normalised values": 2 * tokens * width,
        "… and their weighted ones, which qkv and up read": 2 * tokens * width,
        "… and 1 / deviation / width of each row": 2 * tokens,
        "queries, keys and values, in one tensor": tokens * 3 * width,
        "attention: its result, and a sum of exponentials for each head": tokens * width + tokens * heads,
        "relu: its result, which down reads": tokens * inner,
    }
    where_relu_is_zero = tokens * inner
    assert layer.saved_bytes == 4 * sum(saved_numbers.values()) + where_relu_is_zero


def test_each_distinct_block_is_traced_and_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, priced = [], []
    trace, of_block = distinct_blocks._traced, pricing._price
    monkeypatch.setattr(
        distinct_blocks, "_traced", lambda subgraph, *args: traced.append(subgraph.key) or trace(subgraph, *args)
    )
    monkeypatch.setattr(pricing, "_price", lambda block, *args: priced.append(block.key) or of_block(block, *args))
    model_price = price(model("decoder"))
    # embedding, head; of three equal layers the three segments and the whole. The rest of the graph is one of each.
    assert len(traced) == len(set(traced)) == 6
    assert len(priced) == len(set(priced)) == 6
    assert model_price.costs[1:4] == model_price.costs[4:7] == model_price.costs[7:10]


def test_a_block_is_traced_once_for_every_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, traced = model("decoder"), {}
    alone = price(captured, recompute="block")
    for recompute in ("none", "min-cut"):
        price(captured, recompute=recompute, traced=traced)
    monkeypatch.delattr(distinct_blocks, "trace")
    assert price(captured, recompute="block", traced=traced).costs == alone.costs


def test_stages_add_up() -> None:
    priced = price(model("tests.models.late_input"))
    segments = len(priced.costs)
    total = priced.stage(0, segments)
    for cut in range(1, segments):
        first, second = priced.stage(0, cut), priced.stage(cut, segments)
        assert first.flops + second.flops == total.flops
        assert first.parameter_bytes + second.parameter_bytes == total.parameter_bytes
        # To hand a value over is never free, and never more than all the rest.
        assert total.forward * 0.95 <= first.forward + second.forward <= 1.5 * total.forward
        assert min(first.forward, first.weight_grad, second.forward, second.input_grad, first.saved_bytes) >= 0


class Transformed(nn.Module):
    """Reads frequencies, whose work has no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(2 * torch.fft.rfft(self.first(x)), n=16))


def test_what_has_no_formula_is_named() -> None:
    captured = pipegraph.capture(Transformed(), (torch.randn(4, 16),))
    with warned("_fft_c2c, _fft_c2r, _fft_r2c", 'balance="measured"', "register_flop_formula"):
        priced = price(captured)
    assert priced.uncounted == ("_fft_c2c", "_fft_c2r", "_fft_r2c")
    assert sum(cost.flops for cost in priced.costs) == 2 * (2 * 4 * 16 * 16)


@torch.library.custom_op("pipegraph_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """An operation whose backward nobody knows."""
    return x / 2


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(halved(self.middle(self.first(x))))


def test_a_block_that_cannot_be_traced_is_priced_by_its_forward() -> None:
    captured = pipegraph.capture(Opaque(), (torch.randn(4, 8),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        priced = price(captured, "flops")
    messages = [str(warning.message) for warning in caught]
    assert any("The backward of middle cannot be traced by itself" in text and "halved" in text for text in messages)
    assert all("linear" not in text for text in messages if text.startswith("No formula"))
    total, layer = priced.stage(0, 3), 2 * 4 * 8 * 8
    assert (total.forward, total.input_grad, total.weight_grad) == (3 * layer, 0, pytest.approx(2 * 3 * layer))
    assert priced.costs[1].saved_bytes >= 4 * 8 * 4


def test_a_model_without_a_gradient_has_no_backward() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)).argmax(-1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stage = price(pipegraph.capture(Chosen(), (torch.randn(4, 8),))).stage(0, 2)
    assert (stage.input_grad, stage.weight_grad, stage.saved_bytes) == (0, 0, 0)
    assert stage.forward > 0


def test_frozen_layers_have_no_backward_before_the_first_that_learns() -> None:
    stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    stack[:2].requires_grad_(False)
    costs = price(pipegraph.capture(stack, (torch.randn(4, 8),))).costs
    assert [(cost.input_grad > 0, cost.weight_grad > 0) for cost in costs] == [
        (False, False), (False, False), (False, True), (True, True),
    ]  # fmt: skip


class Pair(nn.Module):
    """Neither of its layers reads the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Forked(nn.Module):
    """It begins with a pair, whose W is the whole backward."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.middle, self.head = Pair(), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        left_output, right = self.pair(x)
        return self.head(torch.relu(self.middle(left_output)) + right)


def test_a_layer_inside_which_nothing_crosses() -> None:
    captured = pipegraph.capture(Forked(), (torch.randn(4, 16),))
    times = [(cost.forward, cost.input_grad, cost.weight_grad) for cost in price(captured, hardware=MACHINE).costs]
    assert times[0] == times[1]
    assert times[0][1] == 0 < min(times[0][0], times[0][2])
    assert pipegraph.plan(captured, stages=2).points


def test_bfloat16_halves_every_byte() -> None:
    stack = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    x = torch.randn(ROWS, 64)
    full = price(pipegraph.capture(stack, (x,)), recompute="none").costs[1]
    half = price(pipegraph.capture(stack.bfloat16(), (x.bfloat16(),)), recompute="none").costs[1]
    for name in ("boundary_bytes", "saved_bytes", "parameter_bytes"):
        assert 2 * getattr(half, name) == getattr(full, name)
    assert half.flops == full.flops


class Experts(nn.Module):
    """A mixture of experts whose shapes depend on no value: each expert sees every row, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        parts = (
            expert(x) * ((chosen == index) * weights).sum(-1, keepdim=True) for index, expert in enumerate(self.experts)
        )
        return self.last(sum(parts))


def test_a_mixture_of_experts() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = pipegraph.capture(Experts(), (torch.randn(4, 8),))
        priced = price(captured, "flops")
    row = 2 * 4 * 8
    assert sum(cost.forward for cost in priced.costs) == row * 8 * 6 + row * 4
    plan = pipegraph.plan(captured, stages=2)
    assert plan.boundaries and len(plan.stages) == 2
