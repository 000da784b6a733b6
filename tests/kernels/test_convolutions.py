"""Stages of convolutions and pools: what their graphs leave to libraries."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from pipegraph.kernels.compilers import compile_graphs, decompositions
from pipegraph.kernels.cpu.aten_kernels import without_cpu_pools
from pipegraph.kernels.graphs.division import convolution_backward
from pipegraph.torch_private.fake_tensors import fake_tensors
from pipegraph.torch_private.tracing import trace
from tests.kernels.stages import assert_as_autograd

aten = torch.ops.aten
images = torch.randn(2, 4, 8, 8)


def convolution_masks(graph: fx.Graph) -> list[list[bool]]:
    return [list(node.args[-1]) for node in graph.find_nodes(op="call_function", target=convolution_backward)]


def test_one_call_returns_all_gradients_of_a_convolution_in_b() -> None:
    kernels = assert_as_autograd(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, bias=False)), (images,))
    divided = kernels.variants[-1].divided
    backward = divided.backward(divided.full_mask)
    assert backward.input is not None and backward.weight is not None
    assert convolution_masks(backward.full.module.graph) == [[True, True, False], [True, True, True]]
    assert convolution_masks(backward.input.module.graph) == [[True, False, False]] * 2
    assert convolution_masks(backward.weight.module.graph) == [[False, True, False], [False, True, True]]


def test_a_convolution_that_runs_twice_has_a_call_for_each() -> None:
    shared = nn.Conv2d(4, 4, 3, padding=1)
    kernels = assert_as_autograd(nn.Sequential(shared, nn.Tanh(), shared), (images,))
    divided = kernels.variants[-1].divided
    assert len(convolution_masks(divided.backward(divided.full_mask).full.module.graph)) == 2


def pools(x: Tensor) -> list[Tensor]:
    return list(aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]))


def targets(device: str) -> set[str]:
    with fake_tensors():
        module = trace(pools, (torch.empty(2, 4, 8, 8, device=device),), decompositions(inductor=True))
    return {str(node.target) for node in module.graph.nodes if node.op == "call_function"}


def test_pools_are_left_to_aten_on_a_cpu_alone() -> None:
    assert "pipegraph.max_pool2d_with_indices.default" in targets("cpu")
    assert not any(name.startswith("pipegraph") for name in targets("meta"))
    operation = aten.max_pool2d_with_indices.default
    assert without_cpu_pools({})[operation](torch.empty(1, 1, 2, 2, device="meta"), [2, 2]) is NotImplemented


@pytest.mark.timeout(300)
def test_a_compiled_stage_of_convolutions_and_pools() -> None:
    layers = (nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(6, 2, 1))
    assert_as_autograd(nn.Sequential(*layers), (images,), kernels="inductor")


def test_convolutions_on_a_cpu_are_compiled_in_the_layout_that_was_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Inductor uses deprecated parts of torch
        from torch._inductor import compile_fx, config
    layout_optimizations: list[bool] = []

    def compile_fx_inner(*args: Any, **options: Any) -> Any:
        layout_optimizations.append(config.layout_optimization)
        return lambda inputs: inputs

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)
    for device in ("cpu", "meta"):
        with fake_tensors():
            module = trace(lambda x: [x + 1], (torch.empty(2, device=device),), None)
        compile_graphs([module])
    assert layout_optimizations == [False, True]
