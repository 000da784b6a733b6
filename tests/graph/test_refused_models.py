"""What cannot be captured: the message names the line of the model's source, and the model stays as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import CaptureError, path_from_here
from pipegraph.graph.nodes import path_of
from pipegraph.graph.sources import load
from tests.graph.test_capture import Linears, captured
from tests.messages import refused, warned

ROOT = Path(__file__).parents[2]


def test_control_flow_on_values_names_the_users_line() -> None:
    file = ROOT / "tests/models/data_dependent.py"
    source = load(str(file))
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if "if x.sum()" in text)
    with pytest.raises(CaptureError) as caught:
        pipegraph.capture(source.model, source.args)
    assert str(caught.value).splitlines()[1:] == [
        f"  at {path_from_here(file)}:{line}: if x.sum() > 0:",
        "Try: for a branch, compute both sides and choose with torch.where; for a number, pass it as an argument.",
    ]


class Stochastic(Linears):
    """Leaves its second layer out at random while it is trained."""

    def __init__(self, layerdrop: float, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.layerdrop, self.draw = layerdrop, draw

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training:
            chance = self.draw()
            if chance < self.layerdrop:
                return x
        return self.b(x)


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "uniform": lambda: random.uniform(0, 1),
    "choice": lambda: random.choice([0.1, 0.9]),
    "numpy": np.random.rand,
    "torch": lambda: torch.rand([]),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_stochastic_depth_that_is_switched_off_is_captured(draw: str) -> None:
    state = random.getstate(), np.random.get_state()[1].tolist()
    capture = captured(Stochastic(0, DRAWS[draw]), torch.ones(2, 4))
    assert [str(node.target) for node in capture.nodes] == ["aten.linear.default"] * 2
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state


@pytest.mark.parametrize("draw", DRAWS)
def test_stochastic_depth_by_a_branch_is_refused(draw: str) -> None:
    model = Stochastic(0.5, DRAWS[draw])
    for _ in range(4):  # whatever is drawn
        with refused(CaptureError, "Stochastic", "training mode", "test_refused_models.py:", advice="layerdrop=0"):
            captured(model, torch.ones(2, 4))


def test_a_branch_on_what_a_dropout_returns_is_not_taken_for_a_probability() -> None:
    class Branches(Linears):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            if self.dropout(x).sum() > 0.5:
                return self.a(x)
            return self.b(x)

    with refused(CaptureError, "Branches", "values of a tensor", "test_refused_models.py:", advice="torch.where"):
        captured(Branches(), torch.ones(2, 4))


def test_a_random_number_in_the_graph_is_refused() -> None:
    class Scaled(Linears):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * random.random())

    with refused(CaptureError, "Scaled", "random numbers of Python", advice="torch.rand()"):
        captured(Scaled(), torch.ones(2, 4))


def test_what_draws_in_training_mode_alone_is_captured_in_evaluation_mode() -> None:
    with warned("Stochastic", "evaluation mode", "random numbers of Python"):
        capture = captured(Stochastic(0.5, random.random).eval(), torch.ones(2, 4))
    assert len(capture.nodes) == 2 and not capture.training


@pytest.mark.parametrize(
    ("compare", "bound", "expected"),
    [
        (torch.lt, 0, False), (torch.lt, -0.5, False), (torch.lt, 1, True), (torch.lt, 0.5, None),
        (torch.le, 0, None), (torch.le, -0.1, False), (torch.le, 1.0, True),
        (torch.gt, 0, None), (torch.gt, -0.1, True), (torch.gt, 1, False),
        (torch.ge, 0, True), (torch.ge, 2, False), (torch.ge, 0.5, None),
    ],
)  # fmt: skip
def test_comparisons_of_a_random_number_that_have_one_outcome(
    compare: Callable[..., Tensor], bound: float, expected: bool | None
) -> None:
    class Branches(Linears):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if compare(torch.rand(()), bound) else self.b(x)

    if expected is None:
        with refused(
            CaptureError, "Branches", "values of a tensor", "compare(torch.rand(()), bound)", advice="torch.where"
        ):
            captured(Branches(), torch.ones(2, 4))
    else:
        capture = captured(Branches(), torch.ones(2, 4))
        assert [fqn for node in capture.nodes for _, fqn in path_of(node)] == ["a" if expected else "b"]


def test_torch_vmap_is_named() -> None:
    class Mapped(Linears):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.vmap(torch.sin)(self.a(x)))

    with refused(CaptureError, "torch.vmap", "torch.vmap(torch.sin)", advice="whole batch"):
        captured(Mapped(), torch.ones(2, 4))


def test_an_error_of_the_model_names_the_users_line() -> None:
    class Wrong(Linears):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).reshape(3, 3))

    with refused(CaptureError, "Wrong", path_from_here(__file__), "return self.b", advice="the line above"):
        captured(Wrong(), torch.ones(2, 4))


def test_an_error_without_a_line_names_none() -> None:
    with refused(CaptureError, "Sequential", "[2, 3] X [4, 4]", advice="something in it is Python"):
        captured(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 3))


class Condition(Linears):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (self.a(x),)))


class DataDependentShape(Linears):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h[h[:, 0] > 0]).sum()


class ReturnsANumber(Linears):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.a(x), 3


class TakesData(Linears):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) + h.data


@pytest.mark.parametrize(
    ("model", "parts", "advice"),
    [
        (TakesData, ["takes the data", "h.data"], "x.detach()"),
        (Condition, ["cond"], "torch.where"),
        (DataDependentShape, ["shape", "aten.index.Tensor"], "torch.where"),
        (ReturnsANumber, ["returns 3"], "return tensors"),
    ],
)
def test_what_no_stage_could_hold_is_refused(model: type[nn.Module], parts: list[str], advice: str) -> None:
    with refused(CaptureError, *parts, advice=advice):
        captured(model(), torch.ones(2, 4))


class Named(Linears):
    """Of a module, a parameter, a buffer or a key."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        self.key = name if kind == "output" else "x"
        if kind == "module":
            self.add_module(name, nn.Identity())
        elif kind == "parameter":
            self.register_parameter(name, nn.Parameter(torch.ones(4)))
        elif kind == "buffer":
            self.register_buffer(name, torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {self.key: self.b(self.a(x))}


@pytest.mark.parametrize("kind", ["module", "parameter", "buffer", "output"])
@pytest.mark.parametrize(("name", "problem"), [(5000 * "a", "5000 characters"), ("a\ud800", "half a character")])
def test_a_name_that_no_file_could_hold_is_refused(kind: str, name: str, problem: str) -> None:
    with refused(CaptureError, f'the {kind} "a', problem, advice="rename"):
        captured(Named(kind, name), torch.ones(2, 4))


def test_wrong_calls_of_capture() -> None:
    with refused(CaptureError, "torch.nn.Module", "function", advice="pipegraph.capture(model"):
        pipegraph.capture(F.relu)  # type: ignore[arg-type]
    with refused(CaptureError, "args", "Tensor", advice="args=(tokens,)"):
        pipegraph.capture(Linears(), torch.ones(1))  # type: ignore[arg-type]


def test_an_input_of_another_kind_is_refused() -> None:
    class Complexes(Linears):
        def forward(self, x: Tensor, y: Any) -> Tensor:
            return self.b(self.a(x))

    with pytest.raises(CaptureError):
        captured(Complexes(), torch.ones(2, 4), object())


class Bags(nn.Module):
    """Sums of embeddings, joined with dense features of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.dense = nn.EmbeddingBag(20, 4, mode="sum"), nn.Linear(3, 4)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor | None = None) -> Tensor:
        return self.dense(dense) + self.bags(indices, offsets)


def test_bags_at_offsets_are_given_as_lists() -> None:
    """The indices of all rows are one tensor, which is not cut along rows."""
    inputs = torch.randn(4, 3), torch.randint(20, (9,)), torch.tensor([0, 2, 3, 7])
    (mixing,) = captured(Bags(), *inputs).batch.mixing
    assert mixing.operator.startswith("embedding_bag")
    roles = dict.fromkeys(("dense", "indices", "offsets"), "list")
    assert pipegraph.capture(Bags(), inputs, batch_dims=roles).batch.mixing == ()
    assert captured(Bags(), inputs[0], torch.randint(20, (4, 5))).batch.mixing == ()


def test_a_failure_leaves_the_model_as_it_was() -> None:
    source = load(str(ROOT / "tests/models/data_dependent.py"))
    state_before = {key: tensor.clone() for key, tensor in source.model.state_dict().items()}
    source.model.second.eval()
    with pytest.raises(CaptureError):
        pipegraph.capture(source.model, source.args)
    assert [module.training for module in source.model.modules()] == [True, True, False]
    assert all(torch.equal(state_before[key], tensor) for key, tensor in source.model.state_dict().items())
