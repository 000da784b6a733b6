"""A model of many equal layers is captured with a few of them; its graph is that of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import pipegraph
from pipegraph.graph import capture as capturing
from pipegraph.graph.calls import functions_of
from pipegraph.graph.captured import BRANCH, Captured
from pipegraph.graph.layer_blocks import NotRepeatedError
from pipegraph.graph.layer_runs import layer_runs
from pipegraph.graph.nodes import label_of

WIDTH = 8


class Layer(nn.Module):
    """Has what capture marks: modes, a buffer that is written, a helper, random numbers, an index."""

    def __init__(self, index: int, kind: str = "") -> None:
        super().__init__()
        self.index, self.kind = index, kind
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = self.inner(x) * scale
        if self.kind == "wide":
            h = torch.cat([h, h], dim=-1).chunk(2, dim=-1)[0].tanh()
        if self.training:
            h = h + torch.rand_like(h)
        return x + self.norm(h)


class Stack(nn.Module):
    def __init__(self, count: int = 8, kinds: tuple[str, ...] = ("",)) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(index, kinds[index % len(kinds)]) for index in range(count))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = x.mean().cos()
        for layer in self.layers:
            x = layer(x, scale) * 0.5
        return self.last(x) * scale


class Bare(Stack):
    """The model returns what it computes of the last layer, and an earlier value."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.first(x)
        scale = x.mean().cos()
        for layer in self.layers:
            x = layer(x, scale).relu()
        return {"x": x, "scale": scale}


class Route(nn.Module):
    """Writes into one of two results of an operation, as the gates of experts do; the other one is of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).topk(2)
        weights /= weights.sum(-1, keepdim=True)
        return x + (x.gather(1, chosen.reshape(-1, 2)) * weights).sum(-1, keepdim=True)


class TwoStacks(nn.Module):
    """One list after the other, the second zipped with a list of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(9)))
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        for layer, norm in zip(self.decoder, self.norms, strict=True):
            x = norm(layer(x)).sin() * memory
        return x + memory


class Scaled(Stack):
    """Reads the number of an iteration."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, x.mean()) * (1 / (number + 1))
        return self.last(x)


class Tapped(Stack):
    """Returns what two layers compute, at places that only a number says."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        taps = []
        for number, layer in enumerate(self.layers):
            x = layer(x, x.mean())
            if number in (1, len(self.layers) - 2):
                taps.append(x)
        return taps[0], taps[-1]


class Special(Stack):
    """Does something else in the evaluation mode of one layer."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x.mean())
            if not self.training and layer.index == 5:
                x = x * 2
        return self.last(x)


class SharesWeights(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.inner.weight = self.layers[0].inner.weight


class SharesModule(Stack):
    """Each iteration calls one dropout again."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(layer(x, x.mean()))
        return self.last(x)


REPEATED: dict[str, Callable[[], nn.Module]] = {
    "layers": Stack,
    "period": lambda: Stack(13, ("", "wide")),
    "several lists": TwoStacks,
    "writes": lambda: nn.Sequential(nn.Sequential(*(Route() for _ in range(8))), nn.Linear(WIDTH, WIDTH)),
    "evaluation": lambda: Stack().eval(),
    "no head": Bare,
}
NOT_REPEATED = {
    "scaled": Scaled,
    "tapped": Tapped,
    "special": Special,
    "weights": SharesWeights,
    "module": SharesModule,
}


def example() -> tuple[Tensor]:
    torch.manual_seed(0)
    return (torch.randn(4, WIDTH),)


def described(captured: Captured) -> list[Any]:
    """All that is said of each node, but for the names of nodes and the numbers of branches and assignments."""
    numbers = {node: number for number, node in enumerate(captured.graph.nodes)}
    names = {node.name: number for node, number in numbers.items()}
    nodes: list[Any] = []
    for node in captured.graph.nodes:
        meta = dict(node.meta)
        value = meta.pop("val", None)
        meta["val"] = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)
        meta["variables"] = {
            call: {place._replace(order=0) for place in places if not place.is_end}
            for call, places in meta.get("variables", {}).items()
        }
        meta["variables"] = {call: places for call, places in meta["variables"].items() if places}
        meta["functions"] = [(run.key, run.arguments, run.result) for run in functions_of(node)]
        meta["writes"] = names.get(meta.get("writes", ""))
        if BRANCH in meta:
            meta[BRANCH] = meta[BRANCH].training
        arguments = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        nodes.append((node.op, str(node.target), arguments, meta))
    return nodes


@pytest.fixture
def in_part(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each capture was one of a few layers."""
    results: list[bool] = []
    original = capturing._capture_in_part

    def recorded(*arguments: Any) -> Captured | None:
        captured = original(*arguments)
        results.append(captured is not None)
        return captured

    monkeypatch.setattr(capturing, "_capture_in_part", recorded)
    return results


def captured_whole(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Captured:
    with monkeypatch.context() as patched:
        patched.setattr(capturing, "layer_runs", lambda model: [])
        return pipegraph.capture(model, example())


@pytest.mark.parametrize("name", [*REPEATED, *NOT_REPEATED])
def test_the_graph_is_that_of_the_whole_model(name: str, in_part: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = {**REPEATED, **NOT_REPEATED}[name]()
    captured, whole = pipegraph.capture(model, example()), captured_whole(model, monkeypatch)
    assert in_part == [name in REPEATED, False]
    for node, whole_node in zip(described(captured), described(whole), strict=True):
        assert node == whole_node
    for part in ("args", "kwargs", "state", "sizes", "training", "segments", "lines", "device_branch", "hooks"):
        assert getattr(captured, part) == getattr(whole, part), part
    positions = [
        {name: [label_of(node) for node in graph.returned].index(label) for name, label in graph.outputs.items()}
        for graph in (captured, whole)
        if isinstance(graph.outputs, dict)
    ]
    assert positions == [{"x": 0, "scale": 1}] * len(positions) and bool(positions) == (name == "no head")
    assert [*captured.modules] == [*whole.modules] and [*captured.tensors] == [*whole.tensors]
    numbers = {len(block.meta[BRANCH]) for block in captured.nodes if BRANCH in block.meta}
    branches = {node.meta[BRANCH].number for node in captured.nodes if BRANCH in node.meta}
    whole_branches = {node.meta[BRANCH].number for node in whole.nodes if BRANCH in node.meta}
    assert len(branches) == len(whole_branches) and numbers <= {2}


def test_integers_have_no_gradient() -> None:
    nodes = pipegraph.capture(REPEATED["writes"](), example()).nodes
    integers = [
        node for node in nodes if isinstance(node.meta["val"], Tensor) and node.meta["val"].dtype == torch.int64
    ]
    assert integers and not any(node.meta["requires_grad"] for node in integers)


@pytest.mark.parametrize("model", [Stack(), Bare()], ids=["head", "no head"])
def test_the_package_is_that_of_the_whole_model(
    model: nn.Module, tmp_path: Path, in_part: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = []
    for name, captured in (
        ("part", pipegraph.capture(model, example())),
        ("whole", captured_whole(model, monkeypatch)),
    ):
        plan = pipegraph.plan(captured, points=["layers.2", "layers.6"])
        packages.append(pipegraph.write_package(plan, tmp_path / name))
    assert in_part == [True, False]
    for file in packages[0].path.iterdir():
        assert file.read_bytes() == (packages[1].path / file.name).read_bytes(), file.name


def test_the_model_is_left_as_it_was() -> None:
    model = Stack()
    layers, names = list(model.layers), list(model.state_dict())
    pipegraph.capture(model, example())
    assert list(model.layers) == layers and list(model.state_dict()) == names


def test_layers_with_other_attributes_are_no_run() -> None:
    model = Stack()
    (run,) = layer_runs(model)
    assert (run.name, run.start, run.period, run.units) == ("layers", 0, 1, 8)
    model.layers[4].kind = "wide"
    (run,) = layer_runs(model) or (None,)
    assert run is None
    hooked = Stack(9)
    hooked.layers[8].register_forward_hook(lambda *arguments: None)
    (run,) = layer_runs(hooked)
    assert (run.start, run.units) == (0, 8)


def test_a_failure_with_few_layers_captures_the_whole(monkeypatch: pytest.MonkeyPatch, in_part: list[bool]) -> None:
    def fail(*arguments: Any) -> None:
        raise NotRepeatedError

    monkeypatch.setattr(capturing, "with_all_layers", fail)
    captured = pipegraph.capture(Stack(), example())
    assert in_part == [False] and len(captured.segments) == 10
