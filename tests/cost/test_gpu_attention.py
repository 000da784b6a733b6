"""Attention as a GPU computes it, told without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipegraph
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.price import price
from pipegraph.cost.roofline.fused_kernels import fused_attention
from pipegraph.cost.roofline.graph_price import trace_aten
from pipegraph.cost.roofline.operator_work import name_of
from pipegraph.cost.segments.chain import find_chain
from pipegraph.cost.segments.distinct_blocks import BlockOptions, group_segments
from tests.cost.models import model

HALF = torch.bfloat16
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor, **options: Any) -> list[str]:
    """The kernels of attention in the graph."""

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        return fused_attention(*inputs, **options)

    graph = trace_aten(function, (query, key, value, *mask)).graph
    (output,) = graph.output_node().args[0]  # type: ignore[misc]
    assert output.meta["val"].shape == (*query.shape[:-1], value.shape[-1])
    return [name_of(node) for node in graph.nodes if "attention" in str(node.target)]


def tensors(heads: int = 4, shared: int = 4, size: int = 64, of_value: int = 64, dtype: torch.dtype = HALF) -> Any:
    return (
        torch.empty(2, heads, 16, size, dtype=dtype),
        torch.empty(2, shared, 16, size, dtype=dtype),
        torch.empty(2, shared, 16, of_value, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("given", "kernel"),
    [
        (tensors(), FLASH),
        (tensors(shared=2), FLASH),  # heads that share keys and values
        (tensors(size=192, of_value=128), EFFICIENT),  # as DeepSeek's
        (tensors(size=512, of_value=512), EFFICIENT),
        (tensors(dtype=torch.float32), EFFICIENT),
        (tensors(shared=2, dtype=torch.float32), EFFICIENT),
        ((*tensors(), torch.empty(16, 16, dtype=torch.bool)), EFFICIENT),
        ((*tensors(), torch.empty(2, 1, 16, 16, dtype=HALF)), EFFICIENT),
    ],
)
def test_the_kernel_is_the_one_that_torch_takes_there(given: Any, kernel: str) -> None:
    assert run(*given, enable_gqa=given[1].shape[1] != given[0].shape[1]) == [kernel]


def test_no_scores_are_kept_on_a_gpu() -> None:
    """Where the heads of keys and values differ in size a CPU writes all scores out."""

    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.values = nn.Linear(32, 4 * 48), nn.Linear(32, 4 * 32)
            self.out = nn.Linear(4 * 32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, value = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.queries, self.values))
            mixed = nn.functional.scaled_dot_product_attention(query, query, value, is_causal=True)
            return self.out(mixed.transpose(1, 2).flatten(2))

    captured = pipegraph.capture(Latent(), (torch.randn(1, 256, 32),))
    saved = {
        gpu: sum(
            part.block.saved.bytes for part in group_segments(find_chain(captured), BlockOptions(gpu=gpu)).segments
        )
        for gpu in (False, True)
    }
    scores = 4 * 4 * 256 * 256
    assert saved[False] > scores > saved[True]


def test_the_same_work_on_every_device() -> None:
    on_gpu, on_cpu = (price(model("decoder"), "flops", hardware=Hardware.load(name)) for name in ("h100", "cpu"))
    assert [cost.flops for cost in on_gpu.costs] == [cost.flops for cost in on_cpu.costs]
    assert not [part.block.refusal for part in on_gpu.parts.segments if part.block.refusal]
