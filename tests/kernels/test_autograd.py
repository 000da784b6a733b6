"""The kernels that leave the derivative to autograd."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.errors import PipegraphError
from pipegraph.kernels import make
from tests.messages import refused


class Product(nn.Module):
    """(x, y) → (x itself, layer(x) · y, a number that nothing uses)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, self.layer(x) * y, x.sum()


def expected(stage: nn.Module, x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    leaf = x.clone().requires_grad_()
    outputs = stage(leaf, y)
    return torch.autograd.grad(outputs[:2], [leaf, *stage.parameters()], [first, second])


@pytest.mark.parametrize("divided", [False, True], ids=["B", "I then W"])
def test_gradients_are_autograds_and_accumulate(divided: bool) -> None:
    stage = Product()
    kernels = make("autograd", stage, (True, False), (True, True, True))
    x, y, first, second = torch.randn(4, 2, 3).unbind()
    for times in (1, 2):
        forward = kernels.forward((x, y))
        gradients = (first, second, None)
        if divided:
            input_gradients = kernels.input_backward(forward.saved, gradients)
            kernels.weight_backward(forward.saved)
        else:
            input_gradients = kernels.backward(forward.saved, gradients)
        of_input, weight, bias = expected(stage, x, y, first, second)
        assert_close(input_gradients[0], of_input)
        assert input_gradients[1] is None
        assert_close(stage.layer.weight.grad, times * weight)
        assert_close(stage.layer.bias.grad, times * bias)
    assert x.grad is None


def test_outputs_carry_no_graph_and_inputs_are_left_alone() -> None:
    x = torch.randn(2, 3)
    forward = make("autograd", Product(), (True, True), (True,) * 3).forward((x, x))
    assert not any(output.requires_grad for output in forward.outputs)
    assert forward.outputs[0].data_ptr() == x.data_ptr()
    assert not x.requires_grad


def test_what_is_saved_does_not_keep_an_output_that_the_backward_does_not_need() -> None:
    forward = make("autograd", nn.Linear(3, 3), (True,), (True,)).forward((torch.randn(2, 3),))
    storage = weakref.ref(forward.outputs[0].untyped_storage())
    saved = forward.saved
    del forward
    gc.collect()
    assert storage() is None
    assert saved is not None


def test_a_forward_without_gradients_saves_nothing() -> None:
    forward = make("autograd", Product(), (True, True), (True,) * 3).forward(
        (torch.ones(2, 3),) * 2, differentiable=False
    )
    assert forward.saved is None


def test_the_loss_is_one_more_output() -> None:
    stage = nn.Linear(3, 1)
    kernels = make("autograd", stage, (True,), (True,), lambda outputs, target: (outputs[0] - target).square().mean())
    x, target = torch.randn(4, 3), torch.randn(4, 1)
    forward = kernels.forward((x,), target=target, with_loss=True)
    loss = (stage(x) - target).square().mean()
    assert_close(forward.loss, loss.detach())
    kernels.backward(forward.saved, (None, torch.tensor(0.5)))
    assert_close(stage.weight.grad, torch.autograd.grad(0.5 * loss, stage.weight)[0])
    assert kernels.forward((x,)).loss is None


def test_a_stage_that_is_frozen_whole_has_a_backward_that_does_nothing() -> None:
    stage = nn.Linear(3, 3).requires_grad_(False)
    kernels = make("autograd", stage, (False,), (True,))
    forward = kernels.forward((torch.ones(2, 3),))
    assert kernels.backward(forward.saved, (torch.ones(2, 3),)) == (None,)


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    kernels = make("autograd", nn.Linear(3, 3), (False,), (False,))
    with refused(PipegraphError, "output 0", "requires_grad false", advice="freeze"):
        kernels.forward((torch.ones(2, 3),))


def test_a_loss_where_there_is_none_is_refused() -> None:
    with refused(PipegraphError, "loss", advice="Pipeline(…, loss_fn=…)"):
        make("autograd", nn.Linear(3, 3), (False,), (True,)).forward((torch.ones(2, 3),), with_loss=True)
