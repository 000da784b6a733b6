"""The operations that a model runs, listed without memory: whether modes and kinds of device have the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph import capture
from pipegraph.cli import main
from pipegraph.graph import evaluation_mode
from pipegraph.graph.export.operation_record import operations_of_model, same_in_both_modes
from tests.codegen.layers import batch

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
    state_before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured = capture(model, X)
    torch.testing.assert_close(dict(model.state_dict()), state_before, rtol=0, atol=0)
    torch.testing.assert_close(captured.tensors["1.num_batches_tracked"], state_before["1.num_batches_tracked"])


def test_what_cannot_run_without_values_is_not_alike() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    assert not same_in_both_modes(Branches(), X, {})


class EqualDropouts(nn.Module):
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

    monkeypatch.setattr(evaluation_mode, "_evaluation_graph", refuse)
    dropout = capture(EqualDropouts(), X).nodes[-1]
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


class Half(nn.Module):
    """Computes in half precision on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * self.table
        if h.device.type == "cuda":
            h = h.half()
        return h.relu()


class Unmasked(Half):
    """Needs a mask on a CPU alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if not h.is_cuda:
            h = h.masked_fill(h < 0, 0.0)
        return h


class Branchless(Half):
    """A choice that torch itself makes by device is not a branch, and neither is a condition without an effect."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type if x.device.type != "mps" else "cpu"
        with torch.autocast(kind, enabled=False):
            positions = torch.arange(x.shape[0], device=x.device)[:, None]
            mixed = F.scaled_dot_product_attention(x[None], x[None], self.linear(x)[None])[0]
        return F.dropout(mixed + positions, 0.1, self.training)


class Moves(Half):
    """Cannot run as if it were elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.arange(8)


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (Half, r"calls relu at {file}:\d+ on cpu, and calls half at {file}:\d+ on cuda"),
        (Unmasked, r"calls \S+ at {file}:\d+ on cpu, and ends on cuda"),
        (Branchless, ""),
        (Moves, ""),
    ],
)
def test_a_branch_is_shown_with_its_lines(model: type[nn.Module], shown: str) -> None:
    branch = pipegraph.capture(model(), (batch(),)).device_branch
    assert re.fullmatch(shown.format(file=r"test_operation_record\.py"), branch)


def test_split_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\nfrom tests.graph.test_operation_record import Half\n\n"
        "model, example_inputs = nn.Sequential(Half(), Half()), (torch.randn(3, 8),)\n"
    )
    with pytest.raises(SystemExit, match="0"):
        main(["split", str(tmp_path / "model.py"), "--points", "1", "-o", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert re.search(r"The model calls relu at \S+ on cpu, and calls half at \S+ on cuda\. The stages", printed)
