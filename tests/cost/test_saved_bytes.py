"""The bytes that segments and stages save for backward, compared with the bytes that the kernels save."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pipegraph
from pipegraph.cost.price import PricedModel, price
from pipegraph.cost.segments import distinct_blocks
from pipegraph.kernels.compilers import compiler, options
from pipegraph.kernels.traced import TracedKernels
from pipegraph.package import CALLER
from pipegraph.recompute import Recompute
from pipegraph.workflows.batch import batch_from_manifest
from tests.cost.models import model

ROWS = 16


def kept_by_kernels(plan: pipegraph.Plan, recompute: str, folder: Path) -> tuple[list[int], list[int]]:
    """Bytes that the graphs of each stage of a package keep after F, and after I, the caller's inputs and the stage's
    state aside."""
    package = pipegraph.write_package(plan, folder)
    manifest = package.manifest
    batch = batch_from_manifest(manifest, 1)
    names = pytree.tree_leaves((manifest.args, manifest.kwargs))
    values: dict[str, Any] = dict(zip(names, pytree.tree_leaves((batch.args, batch.kwargs)), strict=True))
    callers = [value for value in values.values() if isinstance(value, Tensor)]
    ran = []
    for stage in manifest.stages:
        module = package.load_stage(stage.index).train()
        described = [[manifest.values[name] for name in boundary] for boundary in (stage.inputs, stage.outputs)]
        last = stage is manifest.stages[-1]
        kernels = TracedKernels(
            module,
            [value.producer != CALLER and value.requires_grad for value in described[0]],
            [value.requires_grad for value in described[1]],
            distinct_blocks.default_loss if last else None,
            compiler=compiler("eager"),
            options=options("inductor", Recompute.parse(recompute)),
            max_variants=1,
        )
        forward = kernels.forward([values[name] for name in stage.inputs], target=None, with_loss=last)
        values.update(zip(stage.outputs, forward.outputs, strict=True))
        ran.append((stage, module, kernels, forward))

    def saved_sizes() -> list[int]:
        sums = []
        for _, module, _, forward in ran:
            state = {tensor.untyped_storage()._cdata for tensor in [*module.parameters(), *module.buffers(), *callers]}
            saved = {value.untyped_storage()._cdata: value for value in forward.saved.values.values()}
            sums.append(sum(value.untyped_storage().nbytes() for memory, value in saved.items() if memory not in state))
        return sums

    after_forward = saved_sizes()
    gradients: dict[str, Tensor] = {}
    for stage, _, kernels, forward in reversed(ran):
        seeds = [None if forward.loss is not None else gradients.get(name) for name in stage.outputs]
        grads = kernels.input_backward(forward.saved, [*seeds, *([] if forward.loss is None else [torch.tensor(1.0)])])
        for name, gradient in zip(stage.inputs, grads, strict=True):
            if gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return after_forward, saved_sizes()


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
    plan = pipegraph.plan(captured, points=priced.chain.points(cuts))
    assert saved_by(priced, cuts) == kept_by_kernels(plan, recompute, tmp_path / "package")


@pytest.mark.slow
def test_or_nearly(tmp_path: Path) -> None:
    """A segment by itself does not always keep what it does in the middle of a stage."""
    captured = model("tests.models.rotary")
    priced = price(captured)
    plan = pipegraph.plan(captured, points=priced.chain.points([4, 7]))
    (predicted, _), (actual, _) = saved_by(priced, [4, 7]), kept_by_kernels(plan, "min-cut", tmp_path / "package")
    assert predicted == pytest.approx(actual, rel=0.05)


def test_recomputing_blocks_spares_repeated_layers_and_not_the_head(tmp_path: Path) -> None:
    captured = model("decoder")
    min_cut, again = (price(captured, recompute=policy) for policy in ("min-cut", "block"))
    logits, values, sums = 4 * 10 * 50, 4 * 10 * 16, 4 * 10 * 2
    assert again.costs[-1].saved_bytes == min_cut.costs[-1].saved_bytes > logits
    block_stage, min_cut_stage = again.stage(1, 4), min_cut.stage(1, 4)
    # The layer's input, and what attention gave, which is not computed again: it may have drawn random numbers.
    assert block_stage.saved_bytes == values + (values + sums) < min_cut_stage.saved_bytes
    assert block_stage.input_grad + block_stage.weight_grad > min_cut_stage.input_grad + min_cut_stage.weight_grad
    plan = pipegraph.plan(captured, points=["layers.1"])
    assert saved_by(again, [4])[0][1] == kept_by_kernels(plan, "block", tmp_path / "package")[0][1]


class Normed(nn.Module):
    """It begins with a norm, which computes in float32 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


def test_a_layer_that_is_computed_again_keeps_its_input_alone() -> None:
    """Not what the norm's backward makes of the input again."""
    stack = nn.Sequential(*(Normed() for _ in range(4))).bfloat16()
    captured = pipegraph.capture(stack, (torch.randn(ROWS, 64).bfloat16(),))
    priced = price(captured, recompute={"*": "block"})
    inside = [priced.stage(layer.start, layer.stop).saved_bytes for layer in priced.chain.layers[1:-1]]
    assert inside == [2 * ROWS * 64] * 2
