"""Equal modules are traced and compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.kernels import make, maker
from pipegraph.kernels.blocks import differentiate
from pipegraph.kernels.program import CompiledGraph, Program
from pipegraph.kernels.traced import kernels_report
from tests.kernels.cases import build
from tests.kernels.stages import Function, Layer, Layers, assert_as_autograd, linear, x

BLOCKS = {
    "layers": 1,
    "one layer": 0,
    "layers that differ": 0,
    "a layer called again": 1,
    "batch norm in blocks": 1,
    "frozen": 1,
}


def test_equal_layers_are_one_block_and_layers_that_differ_are_not() -> None:
    blocks = [len(assert_as_autograd(*build(name)).variants[-1].divided.blocks) for name in BLOCKS]
    assert dict(zip(BLOCKS, blocks, strict=True)) == BLOCKS


def test_a_stage_of_more_layers_has_no_more_kernels() -> None:
    counts = []
    for layers in (3, 12):
        kernels = assert_as_autograd(Layers(layers), (x,))
        (variant,) = kernels.variants
        programs = variant._programs.values()
        counts.append(len({id(kernel) for program in programs for kernel in program.compiled_graphs()}))
    assert counts[0] == counts[1]


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def test_what_a_backward_computes_again_between_blocks_is_computed_where_it_is_read() -> None:
    """The gate waits for the gradient that comes to it."""
    kernels = assert_as_autograd(nn.Sequential(Layer(), Gate(), Layer(), Gate(), Layer()), (x,), divided=False)
    (variant,) = kernels.variants
    program = variant._programs["B", variant.divided.full_mask]
    codes = [type(instruction.code) for instruction in program.instructions]
    assert codes == [Program, CompiledGraph, Program, CompiledGraph, Program]


class Factor(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.factor


def test_stages_that_are_made_apart_share_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    first = assert_as_autograd(nn.Sequential(Factor(), Factor()), (x,))
    monkeypatch.setattr(Factor, "factor", 2.0)
    second = assert_as_autograd(nn.Sequential(Factor(), Factor()), (x,))
    assert first is not second


def test_stages_that_are_made_together_share_blocks() -> None:
    make_stage = maker("eager")
    stages = [make_stage(Layers(), (True,), (True,), None) for _ in range(2)]
    for kernels in stages:
        kernels.forward((x,))
    (left,), (right,) = ([variant.divided.blocks for variant in stage.variants] for stage in stages)
    assert left == right and len(left) == 1


def test_a_block_that_cannot_be_traced_is_a_part_of_what_is_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: Any, options: Any) -> Any:
        raise RuntimeError("not by itself")

    monkeypatch.setattr(differentiate, "block_of", fail)
    kernels = assert_as_autograd(Layers(), (x,))
    (variant,) = kernels.variants
    assert not variant.divided.blocks


def test_a_closure_that_refers_to_itself() -> None:
    def recursive_function() -> Callable[[Any, Tensor], Tensor]:
        def again(stage: Any, x: Tensor, times: int = 2) -> Tensor:
            return again(stage, stage.a(x), times - 1) if times else x

        return again

    stage = nn.Sequential(*(Function(recursive_function(), **linear("a")) for _ in range(2)))
    assert len(assert_as_autograd(stage, (x,)).variants[-1].divided.blocks) == 1


def test_an_attribute_that_holds_itself() -> None:
    stage = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    stage.tree = [{"name": "root"}]
    stage.tree[0]["inside"] = stage.tree
    assert_as_autograd(stage, (x,))


def test_dropout_differs_between_microbatches_and_layers_and_is_the_same_in_backward() -> None:
    stage = nn.Sequential(*(nn.Sequential(nn.Identity(), Scaled(), nn.Dropout(0.5)) for _ in range(2)))
    kernels = make("eager", stage, (True,), (True,))
    inputs = torch.ones(64, 8)
    masks = []
    for _ in range(2):
        forward = kernels.forward((inputs,))
        mask = forward.outputs[0]
        (gradient,) = kernels.input_backward(forward.saved, (inputs,))
        assert_close(gradient, mask)
        masks.append(mask)
    assert not torch.equal(*masks)
    assert 0.1 < (masks[0] != 0).float().mean() < 0.4  # two masks of a half


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_the_report_says_which_block_could_not_be_traced_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such block\nmore")

    monkeypatch.setattr(differentiate, "_differentiate_call", fail)
    kernels = assert_as_autograd(nn.Sequential(Factor(), Factor()), (x,))
    (count,) = kernels_report({0: kernels})
    inlined = "Factor in it compiled at each call (RuntimeError: no such block, at tests/kernels/test_blocks.py:"
    assert str(count).startswith(f"Sequential (stage 0): 1 static, 0 symbolic, {inlined}")


class Streams(nn.Module):
    """Calls the same layers on two tensors, one after the other, and draws random numbers before each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(p)) for p in (0.1, 0.1, 0.4, 0.4))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for stream in (a, b):
            noise = torch.rand(4)
            for layer in self.layers:
                stream = layer(stream)
            outputs.append(stream + noise)
        return outputs[0], outputs[1]


def test_blocks_draw_in_the_order_of_the_module() -> None:
    """Two calls that need each other's results would run one after the other anyway; these need not."""
    stage, inputs = Streams(), torch.randn(2, 3, 4).unbind()
    kernels = make("eager", stage, [True, True], [True, True])
    for number in range(2):  # traced, and not
        torch.manual_seed(number)
        expected = stage(*inputs)
        torch.manual_seed(number)
        outputs = kernels.forward(inputs).outputs
        assert_close(outputs, tuple(output.detach() for output in expected))
    (variant,) = kernels.variants  # type: ignore[attr-defined]
    assert len(variant.divided.blocks) > 1
