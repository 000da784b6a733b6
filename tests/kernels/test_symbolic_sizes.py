"""From the second shape on, kernels are for all sizes: they equal autograd, and are traced once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.errors import PipegraphError
from pipegraph.kernels import maker
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.stage_variant import StageCall, StageVariant
from pipegraph.kernels.traced import KernelCount, kernels_report
from tests.kernels.cases import build
from tests.kernels.stages import Function, Layers, linear
from tests.messages import refused, warned
from tests.torch_version import TORCH


class Comparison:
    """Compares a stage's kernels with autograd for an input of any shape. Each call is a step of one microbatch."""

    def __init__(self, stage: nn.Module, kernels: str = "eager", loss: Any = None, **options: Any) -> None:
        self.stage, self.reference, self.loss = stage, copy.deepcopy(stage), loss
        self.kernels, self.expected = (
            maker(name, **options)(module, (True,), (True,) * 8, loss)
            for name, module in ((kernels, stage), ("autograd", self.reference))
        )

    def __call__(self, x: Tensor, target: Any = None) -> None:
        options = {"target": target, "with_loss": self.loss is not None}
        outcomes: list[Any] = []
        for kernels in (self.kernels, self.expected):
            torch.manual_seed(0)
            kernels.begin()
            forward = kernels.forward((x,), **options)
            gradients = [torch.ones_like(output) if is_differentiable(output) else None for output in forward.outputs]
            gradients = gradients if self.loss is None else [None] * len(gradients)
            gradients += [] if self.loss is None else [torch.ones(())]
            of_inputs = kernels.input_backward(forward.saved, gradients)
            kernels.weight_backward(forward.saved)
            outcomes.append((forward.outputs, forward.loss, of_inputs))
        assert_close(outcomes[0], outcomes[1], rtol=1e-4, atol=1e-5)
        for parameter, reference in zip(self.stage.parameters(), self.reference.parameters(), strict=True):
            assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-4)
        assert_close(dict(self.stage.named_buffers()), dict(self.reference.named_buffers()), rtol=1e-4, atol=1e-4)

    @property
    def count(self) -> KernelCount:
        """The stage's own count."""
        return self.counts[0]

    @property
    def counts(self) -> list[KernelCount]:
        return kernels_report({0: self.kernels})


def is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("layers", 0),
        ("dropout", 0),
        ("layers that differ", 0),
        ("a view of an input", 0),
        ("an expanded output", 0),
        ("an integer output", 0),
        ("writes", 0),
        ("batch norm in blocks", 0),
        pytest.param("attention", 1, marks=pytest.mark.slow),
        ("convolutions", 2),
        ("an output that is no tensor", 0),
    ],
)
def test_the_second_shape_and_all_others_have_one_kernel(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEGRAPH_VERIFY", "1")
    stage, (x,) = build(name)
    compare = Comparison(stage)
    for increment in (0, 2, 4, 1, 6, 2):
        compare(torch.randn([size + increment * (index == dim) for index, size in enumerate(x.shape)]))
    symbolic = 2 if name == "convolutions" and TORCH < (2, 13) else 1  # torch 2.11 asks whether a size is even
    assert all((count.static, count.symbolic, count.autograd) == (1, symbolic, 0) for count in compare.counts)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_what_is_kept_does_not_matter(recompute: str) -> None:
    compare = Comparison(Layers(), recompute=recompute)
    for rows in (4, 6, 5, 9):
        compare(torch.randn(rows, 8))
    assert [count.compilations for count in compare.counts] == [2, 2]


def test_batch_and_length_vary_together_where_their_names_are_known() -> None:
    def loss(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0].flatten(0, 1), target.flatten())

    compare = Comparison(Layers(), loss=loss)
    compare.kernels.name_dimensions([["batch", "length", 8]])
    for rows, length in ((4, 3), (4, 5), (4, 7), (2, 6), (1, 9), (3, 1), (5, 4)):
        compare(torch.randn(rows, length, 8), target=torch.randint(0, 4, (rows, length)))
    assert [(count.static, count.symbolic) for count in compare.counts] == [(1, 1), (1, 1)]


def test_a_branch_on_a_size_has_kernels_of_its_own() -> None:
    def branch(stage: Any, x: Tensor) -> Tensor:
        return stage.a(x) if x.shape[0] < 8 else stage.b(x)

    compare = Comparison(Function(branch, **linear("a", "b")))
    for rows in (3, 4, 5, 9, 6, 8, 20):
        compare(torch.randn(rows, 8))
    assert (compare.count.static, compare.count.symbolic) == (1, 2)
    assert compare.count.conditions == (("size_0 < 8",), ("size_0 >= 8",))


@pytest.mark.parametrize("squeeze", [lambda x: x.squeeze(), lambda x: x.squeeze(0), lambda x: x.sum(0).expand(2, 3, 8)])
def test_a_size_of_1_is_right_or_has_kernels_of_its_own(squeeze: Any) -> None:
    compare = Comparison(Function(lambda s, x: squeeze(s.a(x)).sum(0) * 2, **linear("a")))
    for rows in (3, 4, 5, 1, 6, 1):
        compare(torch.randn(rows, 3, 8))
    assert compare.count.compilations <= 4


def test_a_size_that_becomes_a_number_has_kernels_for_each_up_to_the_most() -> None:
    def steps(stage: Any, x: Tensor) -> Tensor:
        for _ in range(len(x)):
            x = stage.a(x)
        return x

    compare = Comparison(Function(steps, **linear("a")), max_variants=3)
    for rows in (1, 2, 3, 4):
        compare(torch.randn(rows, 8))
    with warned("3 variants", "branches on sizes", "max_variants"):
        compare(torch.randn(6, 8))
    assert (compare.count.static, compare.count.symbolic) == (1, 3)


def test_what_takes_no_symbols_has_kernels_for_each_shape_up_to_the_most() -> None:
    def strict(stage: Any, x: Tensor) -> Tensor:
        if type(x.shape[0]) is not int:
            raise TypeError("no whole number")
        return stage.a(x)

    compare = Comparison(Function(strict, **linear("a")), max_variants=2)
    for rows in (1, 2, 3):
        compare(torch.randn(rows, 8))
    with warned("TypeError: no whole number", "test_symbolic_sizes.py:", "max_variants"):
        compare(torch.randn(5, 8))
    assert (compare.count.static, compare.count.symbolic) == (3, 0)


class Filter(nn.Module):
    """Weighs the lowest frequencies of a text. Its slices lie between two sizes; a weight's gradient is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(4, 8, 2)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(self.norm(x), dim=1, norm="ortho")
        spectrum = torch.zeros_like(frequencies)
        spectrum[:, :4] = frequencies[:, :4] * torch.view_as_complex(self.weight)
        return x + torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho")


@pytest.mark.parametrize("filters", [1, 2])
def test_slices_between_two_sizes_have_one_kernel(filters: int) -> None:
    compare = Comparison(nn.Sequential(*(Filter() for _ in range(filters))))
    for length in (10, 12, 14, 9, 16, 33):
        compare(torch.randn(2, length, 8))
    assert [(count.static, count.symbolic, count.autograd) for count in compare.counts] == [(1, 1, 0)] * filters


def test_kernels_for_all_sizes_that_do_not_take_their_own_call_are_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DividedFunction, "hold", lambda self, numbers: not numbers)
    compare = Comparison(Function(lambda s, x: s.a(x), **linear("a")), max_variants=2)
    for rows in (3, 4, 5):
        compare(torch.randn(rows, 8))
    with warned("traced for a size", "max_variants"):
        compare(torch.randn(7, 8))
    assert (compare.count.static, compare.count.symbolic) == (3, 0)


def test_kernels_that_take_their_own_call_no_more_once_compiled_are_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    match = StageVariant.match
    monkeypatch.setattr(
        StageVariant, "match", lambda self, call: None if self.layout and self._programs else match(self, call)
    )
    compare = Comparison(Function(lambda s, x: s.a(x), **linear("a")))
    for rows in (3, 4, 5):
        x = torch.randn(rows, 8)
        compare.kernels.prepare((x,), target=None, with_loss=False, differentiable=True, kinds="FIW")
        compare(x)
    assert (compare.count.static, compare.count.symbolic, compare.count.autograd) == (3, 1, 0)


def test_what_cannot_be_traced_is_not_tried_for_every_shape() -> None:
    compare = Comparison(Function(lambda s, x: s.a(x) * float(x.detach().sum()), **linear("a")))
    with warned("Function", "cannot be traced", "test_symbolic_sizes.py:"):
        compare(torch.randn(1, 8))
    for rows in (2, 3, 4):
        compare(torch.randn(rows, 8))
    assert compare.count.autograd == 2


def test_inputs_with_gaps_in_memory() -> None:
    compare = Comparison(Layers())
    for rows in (3, 4, 5, 6):
        compare(torch.randn(rows, 2, 8))
    compare(torch.randn(2, 7, 8).transpose(0, 1))
    compare(torch.randn(7, 9, 8)[:, ::3][:, :2])
    compare(torch.randn(1, 1, 8).expand(7, 2, 8))
    assert compare.count.compilations == 2


def test_a_condition_that_compiling_adds_while_microbatches_are_in_flight() -> None:
    """Sizes that it excludes continue uncompiled, and have other kernels in the next step."""
    compare = Comparison(Layers(1))
    for rows in (3, 4, 5):
        compare(torch.randn(rows, 8))
    kernels: Any = compare.kernels
    variant = kernels.variants[-1]
    x = torch.randn(20, 8)
    saved = kernels.forward((x,)).saved
    assert bool(variant.divided.sizes.values[0] < 10)  # what Inductor does when it chooses by a size
    for program in variant._programs.values():
        for graph in program.compiled_graphs():
            graph.run = None
    (gradient,) = kernels.input_backward(saved, (torch.ones(20, 4),))
    leaf = x.clone().requires_grad_()
    compare.reference(leaf).sum().backward()
    assert_close(gradient, leaf.grad)
    assert variant.match(StageCall.from_arguments((x,), None, False, True)) is None
    kernels.forward((x,))
    assert kernels.variants[-1] is not variant


def test_a_loss_that_is_refused_is_refused_at_every_size() -> None:
    compare = Comparison(
        nn.Linear(8, 4), loss=lambda outputs, target: outputs[0] if len(outputs[0]) > 4 else outputs[0].sum()
    )
    for rows in (3, 4):
        compare(torch.randn(rows, 8))
    with refused(PipegraphError, "loss_fn", "shape [5, 4]", advice="mean"):
        compare(torch.randn(5, 8))


@pytest.mark.slow  # the other tests compile one size after the other
def test_inductor_compiles_for_all_sizes_on_no_condition() -> None:
    """There is no condition for sums of few or many rows, for slices, or for the sizes of the example."""

    def function(stage: Any, x: Tensor) -> Tensor:
        return torch.tanh(stage.a(x[1:]) + stage.b(x[:-1])).flatten(0, 1)

    compare = Comparison(Function(function, **linear("a", "b")), "inductor")
    compare.kernels.prepare((torch.zeros(3, 2, 8),), target=None, with_loss=False, differentiable=True, kinds="FIW")
    for rows in (3, 4, 5, 7, 3000 if TORCH >= (2, 13) else 1000):  # torch 2.11 adds up more than 4096 in another way
        compare(torch.randn(rows, 2, 8))
    assert (compare.count.static, compare.count.symbolic) == (1, 1)
    if TORCH >= (2, 13):
        assert compare.count.conditions == ((),)


@pytest.mark.parametrize(("dynamic", "expected"), [(True, (0, 1)), (False, (4, 0)), ("auto", (1, 1))])
def test_kernels_are_for_all_sizes_when_the_user_says_so(dynamic: Any, expected: tuple[int, int]) -> None:
    compare = Comparison(Layers(), dynamic=dynamic)
    compare.kernels.name_dimensions([["batch", 8]])
    for rows in (4, 6, 5, 9, 4):
        compare(torch.randn(rows, 8))
    assert [(count.static, count.symbolic) for count in compare.counts] == [expected] * len(compare.counts)


def test_kernels_of_each_shape_are_variants() -> None:
    compare = Comparison(Layers(), dynamic=False, max_variants=2)
    with warned("2 variants", "max_variants") as caught:
        for rows in (4, 6, 5, 9, 7):
            compare(torch.randn(rows, 8))
    assert len(caught) == 1
    assert (compare.count.static, compare.count.symbolic) == (2, 0)


def test_a_stage_that_takes_no_symbols_has_kernels_of_each_shape() -> None:
    def strict(stage: Any, x: Tensor) -> Tensor:
        if type(x.shape[0]) is not int:
            raise TypeError("no whole number")
        return stage.a(x)

    compare = Comparison(Function(strict, **linear("a")), dynamic=True)
    compare.kernels.name_dimensions([["batch", 8]])
    for rows in (3, 4, 5):
        compare(torch.randn(rows, 8))
    assert (compare.count.static, compare.count.symbolic) == (3, 0)


@pytest.mark.parametrize("dynamic", [None, "always", 1])
def test_another_choice_is_refused(dynamic: Any) -> None:
    with refused(PipegraphError, "dynamic", repr(dynamic), advice="dynamic=True"):
        maker("eager", dynamic=dynamic)
