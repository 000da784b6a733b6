"""``capture``: names, ties and modes as the model has them, the model as it was, and a graph without export's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import CaptureError
from pipegraph.graph.captured import Captured
from pipegraph.graph.sources import load
from pipegraph.graph.sources.model_source import ModelSource
from tests.captures import captured as captured_once
from tests.messages import refused, warned
from tests.slow import cases

ROOT = Path(__file__).parents[2]
NOT_MODELS = ("__init__.py", "data_dependent.py")
MODELS = [path.name for path in sorted((ROOT / "tests/models").glob("*.py")) if path.name not in NOT_MODELS]


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    return pipegraph.capture(model, args, kwargs)


def operations(graph: Captured) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in graph.nodes]


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)


LARGER = ("llama.py", "mixture_of_experts.py", "rotary.py", "t5.py", "vision_transformer.py")


class WithWeights(NamedTuple):
    """A model, its values, modes and parameters before it was captured, and what it was captured as."""

    source: ModelSource
    values: dict[str, Tensor]
    modes: list[bool]
    parameters: list[nn.Parameter]
    captured: Captured


@cache
def with_weights(name: str) -> WithWeights:
    source = load(str(ROOT / "tests/models" / name))
    model = source.model
    values = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    parameters = list(model.parameters())
    return WithWeights(source, values, modes, parameters, captured(model, *source.args, **source.kwargs))


@pytest.mark.parametrize("name", cases(MODELS, slow=LARGER))
def test_state_is_the_models(name: str) -> None:
    """Names in the order of ``state_dict()``, shapes, dtypes, persistence and ties; and nothing is changed."""
    source, values, modes, parameters, capture = with_weights(name)
    model = source.model
    entries = [entry for entry in capture.state.values() if entry.kind != "constant"]
    assert [entry.fqn for entry in entries if entry.persistent] == list(values)
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    assert {entry.fqn: (entry.shape, entry.dtype, entry.requires_grad) for entry in entries} == {
        fqn: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for fqn, tensor in named.items()
    }
    assert all((named[first_name] is named[two]) for group in capture.tied for first_name in group for two in group)
    assert len({id(tensor) for tensor in named.values()}) == len({entry.canonical for entry in entries})
    assert [module.training for module in model.modules()] == modes
    assert all(original is current for original, current in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(values[key], tensor) for key, tensor in model.state_dict().items())


def test_a_model_can_be_captured_and_split_twice(tmp_path: Path) -> None:
    """torch.distributed.pipelining changes the model, and recurses for ever the second time."""
    source, values, *_, first = with_weights("chain.py")
    folders = []
    for name, capture in (("one", first), ("two", captured(source.model, *source.args))):
        for points in (["layers.2"], ["layers.1", "layers.3"]):
            plan = pipegraph.plan(capture, points=points)
            folders.append(pipegraph.write_package(plan, tmp_path / name / str(len(points))).path)
    for file in folders[0].iterdir():
        assert file.read_bytes() == (folders[2] / file.name).read_bytes()
    fresh_model = load(str(ROOT / "tests/models/chain.py")).model
    fresh_model.load_state_dict(values)
    assert torch.equal(fresh_model(*source.args), source.model(*source.args))


def test_a_graph_is_not_changed_by_a_plan() -> None:
    capture = captured_once("tests/models/chain.py")
    graph_before = str(capture.graph)
    pipegraph.plan(capture, stages=3, balance="uniform")
    assert str(capture.graph) == graph_before


@pytest.mark.parametrize(
    "name",
    cases(["buffers.py", "batch_norm.py", "nested_values.py", "llama.py", "rotary.py"], slow=LARGER),
)
def test_empty_parameters_give_the_same_package(name: str) -> None:
    """Parameters on the meta device cost nothing; buffers are real, ties kept, and the source is the same."""
    from pipegraph.codegen.package_files import generate

    texts = []
    for weights, capture in ((True, with_weights(name).captured), (False, captured_once(f"tests/models/{name}"))):
        empty = {kind: set[bool]() for kind in ("parameter", "buffer", "constant")}
        for entry in capture.state.values():
            empty[entry.kind].add(capture.tensors[entry.fqn].is_meta)
        assert empty["parameter"] == {not weights}
        assert True not in empty["buffer"] | empty["constant"]
        package = generate(pipegraph.plan(capture, stages=3, balance="uniform"), weights=True)
        files, manifest = package.files, package.manifest
        texts.append({**files, "pipeline.json": manifest.to_json()})
    assert texts[0] == texts[1]


def test_what_export_adds_is_dropped() -> None:
    class Casts(Linears):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).float().to(torch.float32).to(x.device).type_as(x).to(x)
            return self.b(h[:, :] + 0)

    targets = operations(captured(Casts(), torch.ones(2, 4)))
    assert targets == ["linear.default", "to.dtype", "type_as.default", "linear.default"]


def test_casts_that_do_something_stay() -> None:
    """Without the checks of dtypes that export puts before them."""

    class Casts(Linears):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).double().float())

    graph = captured(Casts(), torch.ones(2, 4))
    assert operations(graph) == ["linear.default", "to.dtype", "to.dtype", "linear.default"]


def test_a_copy_that_is_written_into_stays() -> None:
    class Copies(Linears):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            copy = h.to(h.dtype, copy=True)
            copy[:, 0] = 0
            return self.b(copy) + h

    assert "to.dtype" in operations(captured(Copies(), torch.ones(2, 4)))


def test_dead_operations_are_dropped() -> None:
    class Dead(Linears):
        def forward(self, x: Tensor) -> Tensor:
            self.b(x).sum()
            return self.a(x)

    assert operations(captured(Dead(), torch.ones(2, 4))) == ["linear.default"]


def test_writes_in_place_become_functional_where_nothing_sees_it() -> None:
    class Writes(Linears):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).mul_(2)
            h += 1
            return self.b(h).relu_()

    assert operations(captured(Writes(), torch.ones(2, 4))) == [
        "linear.default",
        "mul.Tensor",
        "add.Tensor",
        "linear.default",
        "relu.default",
    ]


def test_writes_into_views_stay_and_say_into_what() -> None:
    class Writes(Linears):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h[:, 0] = 1
            return self.b(h)

    graph = captured(Writes(), torch.ones(2, 4))
    assert [node.meta["writes"] for node in graph.nodes if "writes" in node.meta] == ["linear"]


def test_an_input_is_not_written_into() -> None:
    class Writes(Linears):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return self.b(self.a(x))

    x = torch.zeros(2, 4)
    captured(Writes(), x)
    assert torch.equal(x, torch.zeros(2, 4))


def test_gradients_are_marked() -> None:
    class Marked(Linears):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            h = self.a(x)
            with torch.no_grad():
                cut = h * 2
                with torch.enable_grad():
                    attached = h * 3
            return h, h.detach(), cut, attached, x.cos(), h.argmax(-1), torch.stack([h, cut])

    outputs = captured(Marked(), torch.ones(2, 4)).returned
    assert [node.meta["requires_grad"] for node in outputs] == [True, False, False, True, False, False, True]


def test_arguments_that_are_no_tensors_are_constants() -> None:
    class Arguments(Linears):
        def forward(self, x: Tensor, mode: str, *, scale: float = 1.0, flag: bool = False, none: None = None) -> Tensor:
            return self.b(self.a(x)) * scale if mode == "scale" and flag else x

    capture = captured(Arguments(), torch.ones(2, 4), "scale", scale=2.5, flag=True, none=None)
    assert (capture.args, capture.kwargs) == (("x", "mode"), {"scale": "scale", "flag": "flag", "none": "none"})
    assert capture.constants == {"mode": "scale", "scale": 2.5, "flag": True, "none": None}


def test_nested_arguments_and_results() -> None:
    class Nested(Linears):
        def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *more: Tensor) -> dict[str, Any]:
            h = self.a(pair[0]) + pair[1]["k"] + more[1]
            return {"h": h, "rest": [self.b(h), None, (pair[0], h)], "empty": {}}

    x = torch.ones(2, 4)
    capture = captured(Nested(), (x, {"k": x}), x, x)
    assert capture.args == (("pair_0", {"k": "pair_1_k"}), "more_0", "more_1")
    assert capture.outputs == {"h": "add_1", "rest": ["linear_1", None, ("pair_0", "add_1")], "empty": {}}


def test_constants_of_the_code_become_state() -> None:
    class Constants(Linears):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * self.table + torch.tensor([1.0, 2.0, 3.0, 4.0]))

    capture = captured(Constants(), torch.ones(2, 4))
    constants = {
        entry.fqn: (entry.shape, entry.persistent) for entry in capture.state.values() if entry.kind == "constant"
    }
    assert constants == {"table": ((4,), False), "constant": ((4,), False)}
    assert capture.tensors["constant"].tolist() == [1, 2, 3, 4]


def test_modules_and_where_they_are_written() -> None:
    capture = captured_once("tests/models/chain.py")
    line = next(
        i for i, text in enumerate((ROOT / "tests/models/chain.py").read_text().splitlines(), 1) if "class" in text
    )
    assert (capture.modules[""].class_name, capture.modules[""].source) == ("Chain", f"chain.py:{line}")
    assert (capture.modules["layers.0.1"].class_name, capture.modules["layers.0.1"].source) == ("Tanh", "")


def test_an_evaluated_model_is_captured_in_training_and_left_evaluated() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    capture = captured(model, torch.ones(2, 4))
    assert capture.training and not capture.modules["1"].training and not model.training
    assert "dropout.default" in operations(capture)


class Sampled(Linears):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training and torch.rand(()).item() > 0.5:
            h = h * 2
        return self.b(h)


def test_a_model_that_traces_in_evaluation_alone_is_captured_if_it_is_in_that_mode(tmp_path: Path) -> None:
    with refused(
        CaptureError, "Sampled", "training mode", "test_capture.py:", "if self.training", advice="model.eval()"
    ):
        captured(Sampled(), torch.ones(2, 4))
    with warned("Sampled", "evaluation mode", "training mode", "torch.rand"):
        capture = captured(Sampled().eval(), torch.ones(2, 4))
    assert not capture.training
    package = pipegraph.write_package(pipegraph.plan(capture, stages=2), tmp_path / "package")
    stage = package.load_stage(1)
    assert stage(torch.ones(2, 4)).shape == (2, 4)
    with pytest.raises(NotImplementedError, match="Sampled"):
        stage.train()(torch.ones(2, 4))


class Remembers(nn.Module):
    """Sets attributes in its forward: its own and a child's, new ones and old ones, what is inside of others; hooks. It
    writes into tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.last: Tensor | None = None
        self.shapes: dict[str, list[int]] = {"seen": [1]}
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))
        self.sums = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        self.extra = x
        self.linear.flag = True
        self.linear.register_forward_hook(lambda *_: None)
        self.shapes["seen"].append(x.dim())
        self.steps.add_(1)
        self.sums += 1
        return self.norm(self.linear(x))


class BranchesOnValues(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


@pytest.mark.parametrize("build", [Remembers, BranchesOnValues])
def test_attributes_that_forward_sets_are_left_as_they_were(
    build: type[Remembers], capfd: pytest.CaptureFixture[str]
) -> None:
    model = build()
    attributes_before = [set(vars(module)) for module in model.modules()]
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(CaptureError):
        pipegraph.capture(model, (torch.randn(3, 4),))
    assert (model.calls, model.last, model.shapes, model.sums.tolist()) == (0, None, {"seen": [1]}, [0.0] * 4)
    torch.testing.assert_close(dict(model.named_buffers()), values, rtol=0, atol=0)
    assert not model.linear._forward_hooks
    assert [set(vars(module)) for module in model.modules()] == attributes_before
    assert "aten" not in "".join(capfd.readouterr())  # torch would print the graph
