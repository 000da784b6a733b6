"""Gradients of weights are accumulated in place, without other memory or another operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from pipegraph.kernels import make
from tests.kernels.stages import Layers, assert_as_autograd, x


class Operations(TorchDispatchMode):
    """Counts the operations inside by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


class Weight(nn.Module):
    """A stage with a weight [8, 8], used in some way."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


def operations(stage: nn.Module, divided: bool, microbatches: int = 2, kernels: str = "eager") -> Counter[str]:
    """The operations in the backward of a last microbatch."""
    stage_kernels = make(kernels, stage, (True,), (True,))
    for _ in range(microbatches):
        stage_kernels.begin()
        forward = stage_kernels.forward((x,))
        gradients = [torch.ones_like(forward.outputs[0])]
        with Operations() as counter:
            if divided:
                stage_kernels.input_backward(forward.saved, gradients)
                stage_kernels.weight_backward(forward.saved)
            else:
                stage_kernels.backward(forward.saved, gradients)
    return counter.counts


@pytest.mark.parametrize("divided", [True, False])
def test_products_are_added_to_what_is_there(divided: bool) -> None:
    stage = Layers(2)
    counts = operations(stage, divided)
    assert counts["addmm_"] == 5  # two weights of each layer, and that of the head
    gradients = [parameter.grad for parameter in stage.parameters()]
    first = [gradient.clone() for gradient in gradients if gradient is not None]
    assert operations(stage, divided, 1)["addmm_"] == 5
    assert all(parameter.grad is gradient for parameter, gradient in zip(stage.parameters(), gradients, strict=True))
    assert_close([parameter.grad for parameter in stage.parameters()], [1.5 * gradient for gradient in first])


def test_the_first_gradient_is_not_added() -> None:
    assert operations(Layers(2), divided=True, microbatches=1)["addmm_"] == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda x, weight: x @ weight,
        lambda x, weight: x @ weight.t(),
        lambda x, weight: (weight @ x.t()).t(),
        lambda x, weight: (weight.t() @ x.transpose(-2, -1)).transpose(0, 1),
        lambda x, weight: F.linear(x.view(2, 2, 8), weight).flatten(0, 1),
        lambda x, weight: torch.stack([x, x]).unbind()[0] @ weight.permute(1, 0),
    ],
)
def test_however_a_weight_is_used(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_as_autograd(Weight(use), (x,))
    assert operations(Weight(use), divided=False)["addmm_"] == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x, weight: torch.tanh(x @ weight) @ weight,  # the sum of two products
        lambda x, weight: x @ (weight * 2),
        lambda x, weight: x @ weight.view(4, 16)[:, :8].repeat(2, 1),
        lambda x, weight: torch.bmm(x[None], weight[None])[0],
    ],
)
def test_what_is_no_product_is_added_apart(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_as_autograd(Weight(use), (x,))
    assert operations(Weight(use), divided=False)["addmm_"] == 0


def test_a_gradient_that_is_also_an_inputs_is_not_added_twice() -> None:
    """The gradients of both are one product: the sum of a weight and an input goes into it."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight + x) @ torch.ones(8, 3)

    assert_as_autograd(Sum(), (x,))


def test_other_precision_is_added_apart() -> None:
    """A product in bfloat16 is not added to a gradient in float32 before it is one."""
    stage = nn.Linear(8, 8, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert operations(stage, divided=True)["addmm_"] == 0
    assert stage.weight.grad is not None and stage.weight.grad.dtype == torch.float32


def test_compiled_graphs_leave_products_out() -> None:
    """W of linear layers is nothing but products, and has no compiled graph."""
    stage = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False))
    kernels = assert_as_autograd(stage, (x,), divided=True)
    (variant,) = kernels.variants  # type: ignore[attr-defined]
    counts = {kind: len(list(program.compiled_graphs())) for (kind, _), program in variant._programs.items()}
    assert counts == {"F": 1, "I": 1, "W": 0}
