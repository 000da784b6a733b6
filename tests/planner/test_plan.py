"""Plans with given split points: the cuts, errors, and the description of stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import ArgumentError, PlanError
from pipegraph.graph.captured import Captured, split_point
from pipegraph.graph.partition.split_points import Point, SplitPoint
from tests.captures import captured
from tests.messages import refused

ROOT = Path(__file__).parents[2]


def lines(model: str, cut: str | int) -> list[str]:
    """What ``describe()`` says, without the numbers of the stages."""
    points, stages = (cut.split(","), None) if isinstance(cut, str) else (None, cut)
    balance = None if stages is None else "uniform"
    described = pipegraph.plan(captured(model), points=points, stages=stages, balance=balance).describe()
    assert all(line.startswith(f"stage {index}: ") for index, line in enumerate(described))
    return [line.partition(": ")[2] for line in described]


TRANSFORMER, UNET, LLAMA = "examples/transformer.py", "examples/unet.py", "hf:examples/llama"
CHAIN, T5, ROTARY, LATE = (f"tests/models/{name}.py" for name in ("chain", "t5", "rotary", "late_input"))


@pytest.mark.parametrize(
    ("model", "cut", "stages"),
    [
        # a point starts a stage: layers.4 is in it
        (TRANSFORMER, "layers.4", ["tok_embeddings, layers.0 – layers.3", "layers.4 – layers.7, norm, output"]),
        (TRANSFORMER, "layers.3:end", ["tok_embeddings, layers.0 – layers.3", "layers.4 – layers.7, norm, output"]),
        (
            TRANSFORMER,
            "layers.4.linear1,norm:end",
            [
                "tok_embeddings, layers.0 – layers.3, layers.4.self_attn, layers.4.norm1, layers.4.multihead_attn, "
                "layers.4.norm2",
                "layers.4.linear1, layers.4.linear2, layers.4.norm3, layers.5 – layers.7, norm",
                "output",
            ],
        ),
        # a container cuts before its first module, or after its last
        (TRANSFORMER, "layers", ["tok_embeddings", "layers.0 – layers.7, norm, output"]),
        (TRANSFORMER, "layers:end", ["tok_embeddings, layers.0 – layers.7", "norm, output"]),
        (UNET, "down.2,up.1", ["down.0 – down.1", "down.2, bottom, up.0", "up.1 – up.2, head"]),
        pytest.param(
            LLAMA,
            "model.layers.2.mlp,model.norm",
            [
                "model.embed_tokens, model.layers.0 – model.layers.1, model.layers.2.input_layernorm, "
                "model.layers.2.self_attn, model.layers.2.post_attention_layernorm",
                "model.layers.2.mlp, model.layers.3 – model.layers.7",
                "model.norm, lm_head",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            T5,
            "t5.decoder",
            [
                "t5.encoder.embed_tokens, t5.encoder.block.0 – t5.encoder.block.2, t5.encoder.final_layer_norm",
                "t5.decoder.embed_tokens, t5.decoder.block.0 – t5.decoder.block.2, t5.decoder.final_layer_norm, "
                "t5.lm_head",
            ],
            marks=pytest.mark.slow,
        ),
        (LATE, "layers.2,gate", ["layers.0 – layers.1", "layers.2 – layers.3", "gate, head"]),
        # equal numbers of segments; no layer is lost where they do not divide evenly
        (CHAIN, 2, ["layers.0 – layers.1", "layers.2 – layers.3, head"]),
        (CHAIN, 3, ["layers.0 – layers.1", "layers.2", "layers.3, head"]),
        (CHAIN, 4, ["layers.0", "layers.1", "layers.2 – layers.3", "head"]),
        (CHAIN, 5, ["layers.0", "layers.1", "layers.2", "layers.3", "head"]),
        (CHAIN, 1, ["layers.0 – layers.3, head"]),
        (ROTARY, 3, ["embed, layers.0 – layers.1", "layers.2 – layers.4", "layers.5, norm, head"]),
    ],
)
def test_stages(model: str, cut: str | int, stages: list[str]) -> None:
    assert lines(model, cut) == stages


@pytest.mark.parametrize("stages", range(1, 10))
def test_no_layer_is_lost(stages: int) -> None:
    """torchtitan dropped layers that did not divide evenly."""
    plan = pipegraph.plan(captured(ROTARY), stages=stages, balance="uniform")
    assert [node.name for stage in plan.stages for node in stage.nodes if node.name in _work(plan.captured)] == [
        node.name for node in captured(ROTARY).nodes if node.name in _work(plan.captured)
    ]
    placed = [fqn for stage in plan.stages for fqn in stage.state]
    assert set(placed) == set(captured(ROTARY).state)


def _work(graph: Captured) -> set[str]:
    """Operations that no stage makes again."""
    return {node.name for node in graph.nodes if node.meta["requires_grad"]}


def test_points_are_marked_on_the_graph() -> None:
    plan = pipegraph.plan(captured(CHAIN), points=["layers.1", Point("layers.2", SplitPoint.END)])
    nodes = list(plan.captured.graph.nodes)
    markers = [index for index, node in enumerate(nodes) if node.target is split_point]
    assert [nodes[index].args for index in markers] == [("layers.1", "beginning"), ("layers.2", "end")]
    assert [nodes[index + 1].meta["path"][0][1] for index in markers] == ["layers.1", "layers.3"]
    assert [str(point) for point in plan.points] == ["layers.1", "layers.2:end"]
    assert not any(node.target is split_point for node in captured(CHAIN).graph.nodes)


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("layers.4", Point("layers.4", SplitPoint.BEGINNING)),
        (" layers.4 ", Point("layers.4", SplitPoint.BEGINNING)),
        ("layers.4:end", Point("layers.4", SplitPoint.END)),
        ("layers.4:beginning", Point("layers.4", SplitPoint.BEGINNING)),
        ("a:b", Point("a:b", SplitPoint.BEGINNING)),
    ],
)
def test_a_point_is_read(text: str, point: Point) -> None:
    assert Point.parse(text) == point


@pytest.mark.parametrize(
    ("cut", "parts", "advice"),
    [
        ("layer.2", ["point layer.2", '"layers.2"'], "layers.2, or one of layers.1, layers.3"),
        ("layers.9", ["point layers.9"], "layers."),
        ("layer.1", ['"layers.1"'], "layers.1, or one of layers.2, layers.3"),  # layers.0 cuts nothing
        ("layer.0:end", ['"layers.0"'], "layers.0, or one of layers.1, layers.2, layers.3"),
        ("hea", ['"head"'], "head"),
        ("layers.2.7", ["layers.2.7"], "layers.2.1, or one of layers.2.0"),
        ("layers.3,layers.1", ["layers.1 lies before layers.3"], 'points=["layers.1", "layers.3"]'),
        ("layers.2,layers.2", ["layers.2 was given twice"], 'points=["layers.2"]'),
        ("layers.1:end,layers.2", ["point layers.2", "layers.1:end"], 'points=["layers.1:end"]'),
        ("layers.1:end,layers.2,layers.3", ["point layers.2"], 'points=["layers.1:end", "layers.3"]'),
        ("layers.0", ["point layers.0", "first stage"], "such as layers.1"),
        ("layers.0.0", ["point layers.0.0", "first stage"], "layers."),
        ("layers", ["point layers ", "first stage"], "layers."),
        ("head:end", ["point head:end", "last stage"], ""),
    ],
)
def test_points_that_do_not_cut(cut: str, parts: list[str], advice: str) -> None:
    with refused(PlanError, *parts, advice=advice):
        pipegraph.plan(captured(CHAIN), points=cut.split(","))


def test_a_module_that_computes_nothing_is_no_point() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))
    with refused(PlanError, "module 1 ", "computes nothing", advice="one of 2"):
        pipegraph.plan(pipegraph.capture(model, (torch.ones(2, 4),)), points=["1"])


def test_work_that_no_stage_needs_to_send_is_no_first_stage() -> None:
    """Positions and rotary tables come before the embedding, but every stage makes its own: embed cuts nothing."""
    with refused(PlanError, "Split point embed", "first stage", advice="layers.0"):
        pipegraph.plan(captured(ROTARY), points=["embed"])


@pytest.mark.parametrize(
    ("arguments", "kind", "parts", "advice"),
    [
        ({"points": ["layers.1"], "stages": 2}, PlanError, ["split points", "number of stages"], "points or stages"),
        ({}, PlanError, ["No split point", "Chain"], 'points=["layers.2"], or stages=2'),
        ({"points": []}, PlanError, ["No split point", "Chain"], 'points=["layers.2"], or stages=2'),
        ({"stages": 0}, ArgumentError, ["stages", "0"], "stages=2"),
        ({"stages": 6}, PlanError, ["Chain", "5 segments", "6 stages"], "stages=5"),
        (
            {"stages": 6, "balance": "uniform"},
            PlanError,
            ["Chain", "5 segments (layers.0, layers.1, layers.2, layers.3, head)", "6 stages"],
            "stages=5",
        ),
    ],
)
def test_wrong_numbers(arguments: dict[str, object], kind: type[PlanError], parts: list[str], advice: str) -> None:
    with refused(kind, *parts, advice=advice):
        pipegraph.plan(captured(CHAIN), **arguments)  # type: ignore[arg-type]


def test_a_model_without_layers_can_be_cut_between_its_modules() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(4, 4))
            self.relu = nn.ReLU()
            self.second = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(x @ self.first) @ self.second

    plan = pipegraph.plan(pipegraph.capture(Plain(), (torch.ones(2, 4),)), points=["relu"])
    assert plan.describe() == ["stage 0: operations of the model itself", "stage 1: relu"]


def test_a_module_without_parameters_is_listed_where_a_stage_begins_with_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    graph = pipegraph.capture(model, (torch.ones(2, 4),))
    assert pipegraph.plan(graph, points=["2"]).describe() == ["stage 0: 0 – 1", "stage 1: 2 – 3, 5"]
    assert pipegraph.plan(graph, points=["1:end"]).describe() == ["stage 0: 0 – 1", "stage 1: 3, 5"]


def test_too_many_stages_are_refused_before_anything_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    def price(*_: object) -> None:
        raise AssertionError("priced")

    monkeypatch.setattr("pipegraph.cost.price.group_segments", price)
    with refused(PlanError, "Chain", "5 segments", "6 stages", advice="stages=5"):
        pipegraph.plan(captured("tests/models/chain.py"), stages=6)


class Pair(nn.Module):
    """Two modules of which none reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Fan(nn.Module):
    """Layers that all read the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        (a, b), (c, d) = (layer(x) for layer in self.layers)
        return self.head(a * b + c * d)


def test_layers_whose_parts_hand_nothing_over_are_priced() -> None:
    plan = pipegraph.plan(pipegraph.capture(Fan(), (torch.randn(2, 8),)), stages=3)
    assert len(plan.stages) == 3
