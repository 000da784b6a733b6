"""What segments and stages cost: by hand for a linear layer and a small transformer layer, and beside the kernels."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pipegraph
from pipegraph.cost import price as pricing
from pipegraph.cost.price import PricedModel, price
from pipegraph.cost.segments import distinct_blocks
from pipegraph.graph.captured import Captured
from pipegraph.kernels.compilers import compiler, options
from pipegraph.kernels.traced import TracedKernels
from pipegraph.package import CALLER
from pipegraph.recompute import Recompute
from pipegraph.workflows.batch import batch_from_manifest
from tests.cost.models import model
from tests.planner.machine import MACHINE

ROWS = 16


def linear(*widths: int, bias: bool = False) -> Captured:
    made = nn.Sequential(*(nn.Linear(one, other, bias) for one, other in pairwise(widths)))
    return pipegraph.capture(made, (torch.randn(ROWS, widths[0]),))


def test_a_linear_layer_by_hand() -> None:
    first, middle, last = price(linear(32, 64, 48, 8), hardware=MACHINE, recompute="none").costs
    assert (first.flops, middle.flops, last.flops) == (2 * ROWS * 32 * 64, 2 * ROWS * 64 * 48, 2 * ROWS * 48 * 8)
    assert [each.parameter_bytes for each in (first, middle, last)] == [4 * 32 * 64, 4 * 64 * 48, 4 * 48 * 8]
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
    kept = {
        "norms: the normalised values": 2 * tokens * width,
        "… and their weighted ones, which qkv and up read": 2 * tokens * width,
        "… and 1 / deviation / width of each row": 2 * tokens,
        "queries, keys and values, in one tensor": tokens * 3 * width,
        "attention: its result, and a sum of exponentials for each head": tokens * width + tokens * heads,
        "relu: its result, which down reads": tokens * inner,
    }
    where_relu_is_zero = tokens * inner
    assert layer.saved_bytes == 4 * sum(kept.values()) + where_relu_is_zero


def test_each_distinct_block_is_traced_and_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, priced = [], []
    trace, of_block = distinct_blocks._traced, pricing._price
    monkeypatch.setattr(
        distinct_blocks, "_traced", lambda subgraph, *rest: traced.append(subgraph.key) or trace(subgraph, *rest)
    )
    monkeypatch.setattr(pricing, "_price", lambda block, *rest: priced.append(block.key) or of_block(block, *rest))
    found = price(model("decoder"))
    # embedding, head; of three equal layers the three segments and the whole. The rest of the graph is one of each.
    assert len(traced) == len(set(traced)) == 6
    assert len(priced) == len(set(priced)) == 6
    assert found.costs[1:4] == found.costs[4:7] == found.costs[7:10]


def test_a_block_is_traced_once_for_every_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, traced = model("decoder"), {}
    alone = price(captured, recompute="block")
    for recompute in ("none", "min-cut"):
        price(captured, recompute=recompute, traced=traced)
    monkeypatch.delattr(distinct_blocks, "trace")
    assert price(captured, recompute="block", traced=traced).costs == alone.costs


def kept_by_kernels(made: pipegraph.Plan, recompute: str, folder: Path) -> tuple[list[int], list[int]]:
    """Bytes that the graphs of each stage of a package keep after F, and after I, the caller's inputs and the stage's
    state aside."""
    package = pipegraph.write_package(made, folder)
    manifest = package.manifest
    batch = batch_from_manifest(manifest, 1)
    names = pytree.tree_leaves((manifest.args, manifest.kwargs))
    values: dict[str, Any] = dict(zip(names, pytree.tree_leaves((batch.args, batch.kwargs)), strict=True))
    callers = [value for value in values.values() if isinstance(value, Tensor)]
    ran = []
    for stage in manifest.stages:
        module = package.load_stage(stage.index).train()
        described = [[manifest.values[name] for name in each] for each in (stage.inputs, stage.outputs)]
        last = stage is manifest.stages[-1]
        kernels = TracedKernels(
            module,
            [value.producer != CALLER and value.requires_grad for value in described[0]],
            [value.requires_grad for value in described[1]],
            distinct_blocks.mean_square if last else None,
            compiler=compiler("eager"),
            options=options("inductor", Recompute.parse(recompute)),
            max_variants=1,
        )
        forward = kernels.forward([values[name] for name in stage.inputs], target=None, with_loss=last)
        values.update(zip(stage.outputs, forward.outputs, strict=True))
        ran.append((stage, module, kernels, forward))

    def kept() -> list[int]:
        found = []
        for _, module, _, forward in ran:
            own = {each.untyped_storage()._cdata for each in [*module.parameters(), *module.buffers(), *callers]}
            saved = {each.untyped_storage()._cdata: each for each in forward.saved.values.values()}
            found.append(sum(each.untyped_storage().nbytes() for memory, each in saved.items() if memory not in own))
        return found

    after_forward = kept()
    gradients: dict[str, Tensor] = {}
    for stage, _, kernels, forward in reversed(ran):
        wanted = [None if forward.loss is not None else gradients.get(name) for name in stage.outputs]
        came = kernels.input_backward(forward.saved, [*wanted, *([] if forward.loss is None else [torch.tensor(1.0)])])
        for name, gradient in zip(stage.inputs, came, strict=True):
            if gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return after_forward, kept()


def saved_by(priced: PricedModel, cuts: list[int]) -> tuple[list[int], list[int | None]]:
    """The same bytes, as predicted."""
    bounds = [0, *cuts, len(priced.costs)]
    stages = [priced.stage(*bound) for bound in pairwise(bounds)]
    return [stage.saved_bytes for stage in stages], [stage.weight_saved_bytes for stage in stages]


@pytest.mark.parametrize(
    ("name", "recompute", "cuts"),
    [
        ("decoder", "none", [2, 5, 7]),  # inside layers too
        pytest.param("decoder", "min-cut", [4, 7], marks=pytest.mark.slow),
        ("decoder", "layers.*=block", [2, 5, 8]),  # of a layer one stage has two parts, and another one has one
        ("decoder", "layers.*=block", [3, 6]),
        ("tests.models.chain", "none", [1, 2]),
        ("tests.models.chain", "min-cut", [1, 2]),
        pytest.param("tests.models.batch_norm", "none", [1, 2], marks=pytest.mark.slow),
        ("tests.models.batch_norm", "min-cut", [1, 2]),
        ("tests.models.dropout", "min-cut", [2]),
        pytest.param("tests.models.buffers", "min-cut", [2, 4], marks=pytest.mark.slow),
        pytest.param("tests.models.nested_values", "min-cut", [1, 2], marks=pytest.mark.slow),
    ],
)
def test_saved_bytes_are_those_that_the_kernels_keep(
    name: str, recompute: str, cuts: list[int], tmp_path: Path
) -> None:
    captured = model(name)
    priced = price(captured, recompute=recompute)
    made = pipegraph.plan(captured, points=priced.chain.points(cuts))
    assert saved_by(priced, cuts) == kept_by_kernels(made, recompute, tmp_path / "package")


@pytest.mark.slow
def test_or_nearly(tmp_path: Path) -> None:
    """A segment by itself does not always keep what it does in the middle of a stage."""
    captured = model("tests.models.rotary")
    priced = price(captured)
    made = pipegraph.plan(captured, points=priced.chain.points([4, 7]))
    (kept, _), (found, _) = saved_by(priced, [4, 7]), kept_by_kernels(made, "min-cut", tmp_path / "package")
    assert kept == pytest.approx(found, rel=0.05)


def test_recomputing_blocks_spares_repeated_layers_and_not_the_head(tmp_path: Path) -> None:
    captured = model("decoder")
    kept, again = (price(captured, recompute=each) for each in ("min-cut", "block"))
    logits, values, sums = 4 * 10 * 50, 4 * 10 * 16, 4 * 10 * 2
    assert again.costs[-1].saved_bytes == kept.costs[-1].saved_bytes > logits
    one, other = again.stage(1, 4), kept.stage(1, 4)
    # The layer's input, and what attention gave, which is not computed again: it may have drawn random numbers.
    assert one.saved_bytes == values + (values + sums) < other.saved_bytes
    assert one.input_grad + one.weight_grad > other.input_grad + other.weight_grad
    made = pipegraph.plan(captured, points=["layers.1"])
    assert saved_by(again, [4])[0][1] == kept_by_kernels(made, "block", tmp_path / "package")[0][1]


def test_stages_add_up() -> None:
    priced = price(model("tests.models.late_input"))
    segments = len(priced.costs)
    whole = priced.stage(0, segments)
    for cut in range(1, segments):
        one, other = priced.stage(0, cut), priced.stage(cut, segments)
        assert one.flops + other.flops == whole.flops
        assert one.parameter_bytes + other.parameter_bytes == whole.parameter_bytes
        # To hand a value over is never free, and never more than all the rest.
        assert whole.forward * 0.95 <= one.forward + other.forward <= 1.5 * whole.forward
        assert min(one.forward, one.weight_grad, other.forward, other.input_grad, one.saved_bytes) >= 0


class Transformed(nn.Module):
    """Reads frequencies, whose work has no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(2 * torch.fft.rfft(self.first(x)), n=16))


def test_what_has_no_formula_is_named() -> None:
    captured = pipegraph.capture(Transformed(), (torch.randn(4, 16),))
    with pytest.warns(UserWarning, match="No formula counts the work of _fft_c2c, _fft_c2r, _fft_r2c: only the bytes"):
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
    messages = [str(each.message) for each in caught]
    assert any("The backward of middle cannot be traced by itself" in each and "halved" in each for each in messages)
    assert all("linear" not in each for each in messages if each.startswith("No formula"))
    whole, layer = priced.stage(0, 3), 2 * 4 * 8 * 8
    assert (whole.forward, whole.input_grad, whole.weight_grad) == (3 * layer, 0, pytest.approx(2 * 3 * layer))
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
    made = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    made[:2].requires_grad_(False)
    costs = price(pipegraph.capture(made, (torch.randn(4, 8),))).costs
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
        left, right = self.pair(x)
        return self.head(torch.relu(self.middle(left)) + right)


def test_a_layer_inside_which_nothing_crosses() -> None:
    captured = pipegraph.capture(Forked(), (torch.randn(4, 16),))
    times = [(cost.forward, cost.input_grad, cost.weight_grad) for cost in price(captured, hardware=MACHINE).costs]
    assert times[0] == times[1]
    assert times[0][1] == 0 < min(times[0][0], times[0][2])
    assert pipegraph.plan(captured, stages=2).points


def test_bfloat16_halves_every_byte() -> None:
    made = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    x = torch.randn(ROWS, 64)
    full = price(pipegraph.capture(made, (x,)), recompute="none").costs[1]
    half = price(pipegraph.capture(made.bfloat16(), (x.bfloat16(),)), recompute="none").costs[1]
    for name in ("boundary_bytes", "saved_bytes", "parameter_bytes"):
        assert 2 * getattr(half, name) == getattr(full, name)
    assert half.flops == full.flops


class Normed(nn.Module):
    """It begins with a norm, which computes in float32 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


def test_a_layer_that_is_computed_again_keeps_its_input_alone() -> None:
    """Not what the norm's backward makes of the input again."""
    made = nn.Sequential(*(Normed() for _ in range(4))).bfloat16()
    captured = pipegraph.capture(made, (torch.randn(ROWS, 64).bfloat16(),))
    priced = price(captured, recompute={"*": "block"})
    inside = [priced.stage(layer.start, layer.stop).saved_bytes for layer in priced.chain.layers[1:-1]]
    assert inside == [2 * ROWS * 64] * 2


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
    made = pipegraph.plan(captured, stages=2)
    assert made.boundaries and len(made.stages) == 2
