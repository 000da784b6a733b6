"""The operations that a model runs, listed without memory, and whether they are the same in both modes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipegraph import capture
from pipegraph.graph import capture as module_of_capture
from pipegraph.graph.export.operation_record import operations_of_model, same_in_both_modes

X = (torch.randn(2, 4),)


class Asks(nn.Module):
    """Asks for its mode, and keeps what it made."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.p = p
        self.register_buffer("steps", torch.zeros(()))
        self.made: list[Tensor] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        self.made.append(self.last)
        return F.dropout(self.last, self.p if self.training else 0.0)


@pytest.mark.parametrize(("p", "same"), [(0.0, True), (0.5, False)])
def test_modes_are_the_same_if_they_run_the_same_operations(p: float, same: bool) -> None:
    assert same_in_both_modes(Asks(p), X, {}) == same


def test_a_dropout_of_nothing_is_the_same_in_both_modes() -> None:
    assert same_in_both_modes(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), X, {})


def test_the_model_is_left_as_it_was() -> None:
    model = Asks(0.0).eval()
    parameters = model._parameters
    same_in_both_modes(model, X, {})
    assert model.last is None and model.made == [] and not model.training
    assert model._parameters is parameters and type(model.linear.weight) is nn.Parameter


def test_what_counts_in_a_buffer_is_left_as_it_was() -> None:
    class Counts(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.0, self.training)

    model = Counts(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured = capture(model, X)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    torch.testing.assert_close(captured.tensors["1.num_batches_tracked"], before["1.num_batches_tracked"])


def test_what_cannot_run_without_values_is_not_alike() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    assert not same_in_both_modes(Branches(), X, {})


class Alike(nn.Module):
    """Asks for its mode and drops in both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        p = 0.5 if self.training else 0.25 + 0.25
        return F.dropout(self.linear(x), p)


class Reads(nn.Module):
    """Reads another tensor in each mode."""

    def __init__(self, training: str, evaluation: str) -> None:
        super().__init__()
        self.table, self.equal, self.other = torch.zeros(2, 4), torch.zeros(2, 4), torch.ones(2, 4)
        self.names = {True: training, False: evaluation}

    def forward(self, x: Tensor) -> Tensor:
        read = self.names[self.training]
        return torch.tanh(x if read == "input" else torch.tensor(0) if read == "new" else getattr(self, read))


@pytest.mark.parametrize(
    ("training", "evaluation", "same"),
    [("table", "other", False), ("table", "equal", True), ("input", "table", False), ("new", "new", True)],
)
def test_constants_are_the_same_if_their_values_are(training: str, evaluation: str, same: bool) -> None:
    assert same_in_both_modes(Reads(training, evaluation), X, {}) == same


def test_equal_modes_are_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("exported a second time")

    monkeypatch.setattr(module_of_capture, "_evaluation_graph", refuse)
    dropout = capture(Alike(), X).nodes[-1]
    assert dropout.meta["in_every_mode"]


@pytest.fixture
def view_of_keyword() -> Iterator[None]:
    """An operator that returns a view and takes no positional argument."""
    library = torch.library.Library("record_test", "DEF")
    library.define("same(*, Tensor(a) x) -> Tensor(a)")
    library.impl("same", lambda *, x: x.view(x.shape), "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.mark.usefixtures("view_of_keyword")
def test_a_view_of_a_keyword_argument_is_an_operation() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.record_test.same(x=x.tanh())

    ran = operations_of_model(Views(), {}, (torch.ones(2),), {})
    assert [str(operator) for operator, _ in ran] == ["aten.tanh.default", "record_test.same.default"]
