"""Loops of Python over time steps are written for any number of steps, if two captures are written in the same way."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import BatchError
from pipegraph.package import Package
from pipegraph.package.sizes import Size
from tests.codegen.parity import assert_equal_at_every_size, numbers_in_forwards, source, split, write
from tests.runtime.pipelines import pipeline
from tests.slow import cases

pytestmark = pytest.mark.usefixtures("from_graph")

BATCH, STEPS = 3, 7
LENGTHS = ((2, STEPS, 8), (1, 4, 8), (5, 13, 8), (2, 33, 8))


class Steps(nn.Module):
    """A recurrent cell, and what a class makes of its states."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(8, 8)

    def states(self, x: Tensor) -> list[Tensor]:
        state, states = x.new_zeros(x.shape[0], 8), []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        return states


class EachStep(Steps):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.states(x), dim=1) + x


class FirstOutside(Steps):
    """The first step is before the loop."""

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        states = [state]
        for step in range(1, x.shape[1]):
            state = self.cell(x[:, step] - x[:, step - 1], state)
            states.append(state)
        return torch.stack(states, dim=1)


class BothWays(Steps):
    def forward(self, x: Tensor) -> Tensor:
        states, state = self.states(x), x[:, 0]
        for step in reversed(range(x.shape[1])):
            state = self.cell(x[:, step], state)
        return torch.stack(states, dim=1) + state.unsqueeze(1)


class OverElements(Steps):
    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(x.shape[0], 8), []
        for element in x.transpose(0, 1):
            state = self.cell(element, state)
            states.append(state)
        return torch.stack(states).transpose(0, 1)


class Folded(Steps):
    """Its rows and its steps become one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.states(x), dim=1).flatten(0, 1).unflatten(0, (x.shape[0], -1))


@pytest.mark.parametrize(
    "model", cases([EachStep, FirstOutside, BothWays, OverElements, Folded], slow=(BothWays, OverElements))
)
def test_any_number_of_steps_is_taken(model: type[Steps], tmp_path: Path) -> None:
    built = nn.Sequential(OrderedDict(body=model(), head=nn.Linear(8, 8)))
    package = split(tmp_path, built, (torch.randn(BATCH, STEPS, 8),), cut="head")
    assert package.manifest.values["input"].shape == ("batch", "input_1", 8)
    assert "f32[batch, input_1, 8] → f32[batch, input_1, 8]" in source(package)
    assert "input.shape[1] is" not in source(package)
    assert_equal_at_every_size(package, built, *LENGTHS)
    assert_equal_at_every_size(package, built, *LENGTHS, train=False)


class ReplacesItsInput(Steps):
    """Asks for the number of steps when the variable of its input holds something else."""

    def forward(self, x: Tensor) -> Tensor:
        rows, steps, width = x.shape
        x = torch.stack(self.states(x), dim=1).view(-1, width)
        x = self.cell(x, x.sin())
        return x.reshape(rows, steps, width)


def test_a_number_of_steps_is_kept_while_it_is_needed(tmp_path: Path) -> None:
    built = nn.Sequential(OrderedDict(body=ReplacesItsInput(), head=nn.Linear(8, 8)))
    package = split(tmp_path, built, (torch.randn(BATCH, STEPS, 8),), cut="head")
    assert "        steps = x.shape[1]\n" in source(package)
    assert "width = " not in source(package)  # no statement has it
    assert STEPS not in numbers_in_forwards(package)
    assert_equal_at_every_size(package, built, *LENGTHS)


class BranchesAfterwards(Steps):
    def forward(self, x: Tensor) -> Tensor:
        states = self.states(x)
        return torch.stack(states, dim=1) * (2 if x.shape[1] > 20 else 1)


class BranchesOnItsList(Steps):
    def forward(self, x: Tensor) -> Tensor:
        states = self.states(x)
        return torch.stack(states, dim=1) * (2 if len(states) > 20 else 1)


class ScalesLongTexts(Steps):
    """A float factor depends on the length."""

    def forward(self, x: Tensor) -> Tensor:
        states = self.states(x)
        return torch.stack(states, dim=1) * (0.25 if len(states) > 20 else 0.75)


class WeighsLongTexts(Steps):
    """A constant of the code depends on the length."""

    def forward(self, x: Tensor) -> Tensor:
        states = self.states(x)
        return torch.stack(states, dim=1) * torch.tensor([1.5 if len(states) > 20 else 0.5] * 8)


class DependsOnParity(Steps):
    def forward(self, x: Tensor) -> Tensor:
        states = self.states(x)
        return torch.stack(states, dim=1).sin() if len(states) % 2 else torch.stack(states, dim=1)


class DividesByItsSteps(Steps):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.states(x), dim=1) / len(self.states(x)) ** 0.5


REFUSED = [
    BranchesAfterwards,
    BranchesOnItsList,
    ScalesLongTexts,
    WeighsLongTexts,
    DependsOnParity,
    DividesByItsSteps,
]


@pytest.mark.parametrize("model", cases(REFUSED, slow=(BranchesAfterwards, WeighsLongTexts, DependsOnParity)))
def test_steps_on_which_more_depends_are_fixed(model: type[Steps], tmp_path: Path) -> None:
    built = nn.Sequential(OrderedDict(body=model(), head=nn.Linear(8, 8)))
    package = split(tmp_path, built, (torch.randn(BATCH, STEPS, 8),), cut="head")
    assert package.manifest.values["input"].shape == ("batch", STEPS, 8)
    assert "input.shape[1] is 7 in every batch" in source(package)
    assert_equal_at_every_size(package, built, (2, STEPS, 8))


@pytest.mark.parametrize("shapes", [False, {"x": {0: "batch"}}])
def test_steps_that_the_user_fixes_are_fixed(shapes: object) -> None:
    captured = pipegraph.capture(EachStep(), (torch.randn(BATCH, STEPS, 8),), dynamic_shapes=shapes)
    assert captured.other_sizes == ()


class NeedsTwo(Steps):
    """Reads its second step, and takes no text of one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.states(x), dim=1) + x[:, 1:2]


def test_the_fewest_steps_are_those_that_the_model_takes(tmp_path: Path) -> None:
    built = nn.Sequential(OrderedDict(body=NeedsTwo(), head=nn.Linear(8, 8)))
    package = split(tmp_path, built, (torch.randn(BATCH, STEPS, 8),), cut="head")
    assert package.manifest.sizes["input_1"] == Size(captured=STEPS, min=2)
    assert_equal_at_every_size(package, built, (2, 2, 8))


class Translator(nn.Module):
    """Two loops, each with its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write, self.head = nn.GRUCell(8, 8), nn.GRUCell(8, 8), nn.Linear(8, 8)

    def forward(self, text: Tensor, translated: Tensor) -> Tensor:
        state = text.new_zeros(text.shape[0], 8)
        for step in range(text.shape[1]):
            state = self.read(text[:, step], state)
        outputs = []
        for step in range(translated.shape[1]):
            state = self.write(translated[:, step], state)
            outputs.append(state)
        return self.head(torch.stack(outputs, dim=1))


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    captured = pipegraph.capture(Translator(), (torch.randn(BATCH, 5, 8), torch.randn(BATCH, 4, 8)))
    return write(tmp_path_factory.mktemp("translator"), pipegraph.plan(captured, points=["head"]))


def test_two_loops_have_two_lengths(translator: Package) -> None:
    shapes = {name: value.shape for name, value in translator.manifest.values.items()}
    assert shapes["text"] == ("batch", "text_1", 8)
    assert shapes["translated"] == ("batch", "translated_1", 8)
    assert shapes["output"] == ("batch", "translated_1", 8)


def test_two_lengths_that_are_equal_in_the_example_are_two() -> None:
    captured = pipegraph.capture(Translator(), (torch.randn(BATCH, STEPS, 8), torch.randn(BATCH, STEPS, 8)))
    assert [(size.name, size.places) for size in captured.other_sizes] == [
        ("text_1", ("text.shape[1]",)),
        ("translated_1", ("translated.shape[1]",)),
    ]


class Masked(Steps):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.stack(self.states(x), dim=1) * mask.unsqueeze(2)


def test_the_steps_of_a_text_and_its_mask_are_one_size() -> None:
    captured = pipegraph.capture(Masked(), (torch.randn(BATCH, STEPS, 8), torch.ones(BATCH, STEPS)))
    assert [(size.name, size.places) for size in captured.other_sizes] == [("x_1", ("x.shape[1]", "mask.shape[1]"))]


def test_a_step_takes_other_lengths_than_the_captured_one(translator: Package) -> None:
    torch.manual_seed(0)
    model = Translator()
    text, translated = torch.randn(4, 9, 8), torch.randn(4, 6, 8)
    pipe = pipeline(translator, microbatches=2, loss_fn=nn.functional.mse_loss)
    result = pipe.step(text, translated, target=torch.ones(4, 6, 8))
    expected = nn.functional.mse_loss(model(text, translated), torch.ones(4, 6, 8))
    expected.backward()
    torch.testing.assert_close(torch.as_tensor(result.loss), expected.detach())
    gradients = dict(pipe.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad)


def test_a_cut_inside_the_loop_fixes_the_steps(tmp_path: Path) -> None:
    """A stage passes on the values of the steps that are left, and a forward takes a fixed number of values."""
    package = split(tmp_path, EachStep(), (torch.randn(BATCH, STEPS, 8),), cut=2)
    assert package.manifest.values["x"].shape == ("batch", STEPS, 8)
    pipe = pipeline(package, loss_fn=nn.functional.mse_loss)
    with pytest.raises(BatchError, match="x has the shape"):
        pipe.step(torch.randn(BATCH, 4, 8), target=torch.ones(BATCH, 4, 8))
