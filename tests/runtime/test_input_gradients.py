"""Gradients of inputs: adversarial examples, and the generator step of a GAN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.package import Package
from tests.runtime.ranks import run


class Classifier(nn.Module):
    """`x` is read by stages 0 and 1, and `shift`, which has no rows, by stage 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        h = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(h * x + shift)


def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def batch(rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, shift = torch.randn(rows, 4, generator=generator), torch.randn(4, generator=generator)
    return x.requires_grad_(), shift.requires_grad_(), torch.randint(3, (rows,), generator=generator)


def expected(rows: int = 5) -> tuple[Tensor, Tensor]:
    x, shift, labels = batch(rows)
    F.cross_entropy(model()(x, shift), labels).backward()
    assert x.grad is not None and shift.grad is not None
    return x.grad, shift.grad


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    x, shift, _ = batch()
    captured = pipegraph.capture(model(), (x.detach(), shift.detach()))
    plan = pipegraph.plan(captured, points=["middle", "last"])
    return pipegraph.write_package(plan, tmp_path_factory.mktemp("classifier") / "out")


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_gradient_is_that_of_the_whole_batch(package: Package, schedule: str, kernels: str) -> None:
    pipe = pipegraph.Pipeline(package, schedule, 3, F.cross_entropy, kernels=kernels)
    x, shift, labels = batch()
    for step in (1, 2):  # they accumulate
        pipe.step(x, shift, target=labels)
        for tensor, gradient in zip((x, shift), expected(), strict=True):
            torch.testing.assert_close(tensor.grad, step * gradient)
    pipe.evaluate(x, shift, target=labels)
    torch.testing.assert_close(x.grad, 2 * expected()[0])


def test_an_input_may_start_to_require_a_gradient(package: Package) -> None:
    pipe = pipegraph.Pipeline(package, "1f1b", 2, F.cross_entropy, kernels="eager")
    x, shift, labels = batch()
    pipe.step(x.detach(), shift.detach(), target=labels)
    pipe.step(x, shift.detach(), target=labels)
    torch.testing.assert_close(x.grad, expected()[0])
    assert shift.grad is None
    reference = model()
    for _ in range(2):
        F.cross_entropy(reference(x.detach(), shift.detach()), labels).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(dict(pipe.named_parameters())[name].grad, parameter.grad)


def test_each_tensor_of_a_list_gets_its_gradient(package: Package) -> None:
    pipe = pipegraph.Pipeline(package, "1f1b", 2, F.cross_entropy, kernels="eager")
    x, shift, labels = batch()
    parts = [part.detach().requires_grad_() for part in x.split([3, 2])]
    pipe.step(parts, shift, target=list(labels.split([3, 2])))
    gradients = [part.grad for part in parts]
    assert all(gradient is not None for gradient in gradients)
    torch.testing.assert_close(torch.cat([gradient for gradient in gradients if gradient is not None]), expected()[0])


def test_adversarial_training(package: Package) -> None:
    """FGSM: a step along the sign of the gradient, with the parameters frozen, and training on the result."""

    def attacked(x: Tensor) -> Tensor:
        assert x.grad is not None
        return (x + 0.1 * x.grad.sign()).detach()

    pipe = pipegraph.Pipeline(package, "1f1b", 2, F.cross_entropy, kernels="eager")
    x, shift, labels = batch()
    for parameter in pipe.parameters():
        parameter.requires_grad_(False)
    pipe.step(x, shift.detach(), target=labels)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    for parameter in pipe.parameters():
        parameter.requires_grad_(True)
    loss = pipe.step(attacked(x), shift.detach(), target=labels).loss
    reference, (y, _, _) = model(), batch()
    F.cross_entropy(reference(y, shift.detach()), labels).backward()
    torch.testing.assert_close(loss, F.cross_entropy(reference(attacked(y), shift.detach()), labels).detach())


def test_the_generator_step_of_a_gan(package: Package) -> None:
    """The input is not a leaf: `.grad` is set on it, and the backward of the generator begins there."""

    def generated(generator: nn.Module) -> Tensor:
        return generator(torch.linspace(-1, 1, 10).view(5, 2))

    torch.manual_seed(3)
    generator, reference_generator = nn.Linear(2, 4), nn.Linear(2, 4)
    reference_generator.load_state_dict(generator.state_dict())
    _, shift, labels = batch()
    pipe = pipegraph.Pipeline(package, "zb-h1", 2, F.cross_entropy, kernels="eager")
    x = generated(generator)
    pipe.step(x, shift.detach(), target=labels)
    x.backward(x.grad)
    F.cross_entropy(model()(generated(reference_generator), shift.detach()), labels).backward()
    torch.testing.assert_close(generator.weight.grad, reference_generator.weight.grad)


def of_rank(rank: int, folder: str, schedule: str, ranks_with_gradient: tuple[int, ...]) -> Any:
    pipe = pipegraph.Pipeline(folder, schedule, 4, F.cross_entropy, kernels="eager")
    x, shift, labels = batch(6)
    for tensor in (x, shift):
        tensor.requires_grad_(rank in ranks_with_gradient)
    pipe.step(x, shift, target=labels)
    return x.grad, shift.grad


def test_stages_of_several_ranks_read_an_input(package: Package) -> None:
    results = run(of_rank, 3, str(package.path), "zb-h1", (0, 1, 2))
    assert all(isinstance(result, tuple) for result in results), results
    (of_x, none), (second_none, of_shift), _ = results
    torch.testing.assert_close(of_x, expected(6)[0])
    torch.testing.assert_close(of_shift, expected(6)[1])
    assert none is None and second_none is None  # the first stage that reads `shift` is on rank 1


def test_ranks_that_disagree(package: Package) -> None:
    results = run(of_rank, 3, str(package.path), "1f1b", (0,))
    assert all("x requires a gradient, and not on rank 1" in result for result in results), results
