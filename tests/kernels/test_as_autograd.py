"""Kernels that are traced give what autograd gives, whatever a stage does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from pipegraph.kernels import make
from tests.kernels.cases import STAGES, build
from tests.kernels.stages import Function, Layer, assert_as_autograd, linear, tokens, x
from tests.slow import cases

RECOMPUTED = (
    "layers",
    "dropout",
    "a layer called again",
    "frozen",
    "writes",
    "batch norm in blocks",
    "attention",
    "an RNN",
)


@pytest.mark.parametrize("name", STAGES)
def test_as_autograd(name: str) -> None:
    stage, inputs = build(name)
    assert_as_autograd(stage, inputs)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("name", cases(RECOMPUTED, slow=("an RNN", "attention", "a layer called again")))
def test_recomputation(name: str, recompute: str) -> None:
    stage, inputs = build(name)
    assert_as_autograd(stage, inputs, recompute=recompute)


@pytest.mark.parametrize(
    "name", cases([name for name in STAGES if name != "an RNN"], slow=RECOMPUTED)
)  # which is left to autograd
def test_without_gradients_of_inputs(name: str) -> None:
    stage, inputs = build(name)
    assert_as_autograd(stage, inputs, needs_grad=[False] * len(inputs))


@pytest.mark.parametrize(
    "name",
    cases(
        [
            *("layers", "dropout", "convolutions", "batch norm", "attention"),
            *("views of one value", "integers", "an expanded gradient"),
        ],
        slow=("layers", "convolutions", "batch norm", "attention"),
    ),
)
def test_inductor(name: str) -> None:
    stage, inputs = build(name)
    if name in ("dropout", "attention"):
        stage.eval()
    assert_as_autograd(stage, inputs, kernels="inductor")


def test_a_gradient_that_does_not_come() -> None:
    stage = Function(lambda s, x: (s.a(x), s.b(x)), **linear("a", "b"))
    for has_gradients in ((True, False), (False, True)):
        for divided in (True, False):
            assert_as_autograd(copy.deepcopy(stage), (x,), has_gradients=has_gradients, divided=divided)


def test_a_gradient_that_does_not_come_to_a_block() -> None:
    stage = Function(lambda s, x: s.b(s.a(x)[0])[1], a=Two(), b=Two())
    assert_as_autograd(stage, (x,))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Checkpointed(nn.Module):
    """A layer that the backward computes again, by torch's own way to do that."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def test_layers_in_a_checkpoint() -> None:
    assert_as_autograd(nn.Sequential(*(Checkpointed(Layer()) for _ in range(3))), (x,))


@pytest.mark.parametrize("layers", [1, 2])
def test_dropout_in_a_checkpoint_has_the_same_mask_in_the_backward(layers: int) -> None:
    stage = nn.Sequential(*(Checkpointed(Layer(0.5)) for _ in range(layers))).double()
    kernels = make("eager", stage, (True,), (True,))
    features, gradient, direction = torch.randn(3, 4, 8, dtype=torch.float64).unbind()

    def at(step: float) -> Any:
        torch.manual_seed(0)
        return kernels.forward((features + step * direction,))

    with pytest.warns(UserWarning, match="random numbers"):
        saved = at(0).saved
    (input_gradient,) = kernels.backward(saved, (gradient,))
    slope = sum(sign * (at(sign * 1e-6).outputs[0] * gradient).sum() for sign in (1, -1)) / 2e-6
    assert_close((input_gradient * direction).sum(), slope, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_a_convolutions_weight_waits_for_w() -> None:
    divided = assert_as_autograd(*build("convolutions")).variants[-1].divided
    backward = divided.backward(divided.full_mask)
    for part, expected_mask in ((backward.input, [True, False]), (backward.weight, [False, True])):
        assert part is not None
        masks = [list(node.args[-1][:2]) for node in part.module.graph.nodes if "convolution_back" in str(node.target)]
        assert masks == [expected_mask] * 2


def test_a_gradient_has_the_strides_of_its_parameter() -> None:
    stage = Function(lambda s, x: torch.einsum("bi,oi->bo", x @ s.a.weight, s.b.weight), **linear("a", "b"))
    stage.a.weight = nn.Parameter(torch.randn(8, 8).t())
    assert_as_autograd(stage, (x,))
    assert [s.weight.grad.stride() for s in (stage.a, stage.b)] == [s.weight.stride() for s in (stage.a, stage.b)]


def test_a_sparse_gradient() -> None:
    stage = nn.Embedding(5, 8, sparse=True)
    kernels = make("eager", stage, (False,), (True,))
    for _ in range(2):
        kernels.backward(kernels.forward((tokens,)).saved, (torch.ones(4, 8),))
    assert stage.weight.grad.is_sparse
    assert_close(stage.weight.grad.to_dense()[tokens[0]], torch.full((8,), 2.0 * (tokens == tokens[0]).sum()))


def test_autocast_around_a_step() -> None:
    stage = Function(lambda s, x: s.b(s.a(x)), **linear("a", "b"))
    reference = copy.deepcopy(stage)
    kernels, plain = make("eager", stage, (True,), (True,)), make("autograd", reference, (True,), (True,))
    with torch.autocast("cpu", torch.bfloat16):
        first, second = kernels.forward((x,)), plain.forward((x,))
    assert first.outputs[0].dtype == torch.bfloat16
    assert_close(first.outputs, second.outputs)
    gradient = (torch.ones(4, 8, dtype=torch.bfloat16),)
    assert_close(kernels.backward(first.saved, gradient), plain.backward(second.saved, gradient))
    assert_close(stage.a.weight.grad, reference.a.weight.grad)
    assert kernels.forward((x,)).outputs[0].dtype == torch.float32
