"""Recurrent layers of torch: calls of them, with the states that they take and return."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from tests.codegen.layers import batch
from tests.codegen.parity import assert_equal_at_every_size, differences, forward_lines, source, split
from tests.slow import cases

pytestmark = pytest.mark.usefixtures("from_graph")


class Recurrences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2, bidirectional=True, dropout=0.2)
        self.cell = nn.GRUCell(16, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.rnn = nn.RNN(8, 4, nonlinearity="relu")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(x)
        z, _ = self.gru(self.cell(y[-1])[None])
        return self.rnn(z)[0], h, c


def hooked_recurrences() -> nn.Module:
    model = Recurrences()
    for layer in (model.lstm, model.gru, model.rnn):
        layer.register_forward_hook(lambda module, inputs, output: (output[0] * 2, output[1]))
    return model


class States(nn.Module):
    """Takes and gives states as its source says, positional arguments included."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.second = nn.LSTM(8, 8, 2, bias=False, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.layer = Layer()
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.lstm(x)
        out, (_, c) = self.second(out, (h, c))
        _, hidden = self.gru(out)
        y, (state, _) = self.layer(out)
        return self.b(hidden[-1]) + c[0] + y.mean(1) + state[-1]


class Layer(nn.Module):
    """A module of the model's own that returns a tuple in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, states = self.lstm(x)
        return output * 2, states


CASES = {
    "recurrences": (Recurrences, "cell", batch(5, 3, 4)),
    "cut late": (Recurrences, "rnn", batch(5, 3, 4)),
    "with hooks": (hooked_recurrences, "cell", batch(5, 3, 4)),
    "states": (States, "b", batch(3, 4, 8)),
}


@pytest.mark.parametrize("case", cases(list(CASES), slow=("with hooks",)))
def test_parity(case: str, tmp_path: Path) -> None:
    build, cut, x = CASES[case]
    model = build()
    assert differences(split(tmp_path, model, (x,), cut=cut), model, (x,), train=True) == []


def test_states_are_unpacked_as_in_the_source(tmp_path: Path) -> None:
    package = split(tmp_path, States(), (batch(3, 4, 8),), cut="b")
    assert forward_lines(package)[:-1] == [
        "out, (h, c) = self.lstm(x)",
        "out, (_, c) = self.second(out, (h, c))",
        "_, hidden = self.gru(out)",
        "y, state = self.layer(out)",
    ]
    assert "self.second = nn.LSTM(8, 8, num_layers=2, bias=False, batch_first=True)" in source(package)


class Tagger(nn.Module):
    """Layers of every kind, whose sequences and last states are read."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True, proj_size=4)
        self.gru = nn.GRU(8, 4, bias=False)
        self.rnn = nn.RNN(4, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, (last, _) = self.lstm(x)
        y = self.gru(x.transpose(0, 1))[0].transpose(0, 1)
        return self.head(self.rnn(y)[0]) + last.sum((0, 2))[:, None, None]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_any_number_of_steps_is_taken(tmp_path: Path) -> None:
    model = Tagger()
    package = split(tmp_path, model, (batch(3, 13, 8),), cut="gru,head")
    assert package.manifest.values["y"].shape == ("x_1", "batch", 8)
    assert_equal_at_every_size(package, model, (3, 13, 8), (2, 5, 8), (1, 17, 8), (4, 1, 8))


@pytest.mark.timeout(300)  # each length is traced with its steps unrolled: 80 s alone on a slow core
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_kernels_take_any_number_of_steps(kernels: str, tmp_path: Path) -> None:
    model = Tagger()
    package = split(tmp_path, model, (batch(2, 5, 8),), cut="head")
    pipe = pipegraph.Pipeline(package, "zb-h1", microbatches=2, loss_fn=F.mse_loss, kernels=kernels)
    for length in (5, 3, 4):
        x, target = batch(4, length, 8), batch(4, length, 5)
        model.zero_grad()
        F.mse_loss(model(x), target).backward()
        pipe.step(x, target=target)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
            parameter.grad = None


@pytest.mark.slow
def test_layers_that_are_no_modules_are_functions_of_torch(tmp_path: Path) -> None:
    text = source(split(tmp_path, hooked_recurrences(), (batch(5, 3, 4),), cut="cell"))
    functions = ["torch.lstm(", "torch.gru(", "torch.rnn_relu("]
    assert [function for function in functions if function not in text] == []
    assert "torch.ops" not in text
