"""``PIPEGRAPH_VERIFY=1``: a planted fault of each kind is found, with the pass, the node and the line of the model."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import pipegraph
from pipegraph.debug import InvalidGraphError
from pipegraph.graph import pass_order

aten = torch.ops.aten
Plant = Callable[[fx.Graph], object]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.table[:2] += 1
        return h * 2 + self.table


def _node(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def _call(graph: fx.Graph, successor: fx.Node, like: fx.Node) -> fx.Node:
    with graph.inserting_before(successor):
        node = graph.call_function(like.target, like.args)
    node.meta = dict(like.meta)
    return node


def _read_erased(graph: fx.Graph) -> None:
    mul = _node(graph, "mul")
    users = dict(mul.users)
    mul.users.clear()
    graph.erase_node(mul)
    mul.users.update(users)


def _move_up(graph: fx.Graph) -> None:
    _node(graph, "linear").prepend(_node(graph, "mul"))


PLANTS: dict[str, tuple[Plant, str, str]] = {
    "erased": (_read_erased, "add", "reads mul, which is erased"),
    "order": (_move_up, "mul", "reads linear, which comes after it"),
    "user": (lambda graph: _node(graph, "linear").users.clear(), "mul", "does not have it as a user"),
    "val": (lambda graph: _node(graph, "mul").meta.pop("val"), "mul", "lacks val in its metadata"),
    "path": (lambda graph: _node(graph, "mul").meta.pop("path"), "mul", "lacks path in its metadata"),
    "gradient": (lambda graph: _node(graph, "mul").meta.pop("requires_grad"), "mul", "lacks requires_grad"),
    "shape": (
        lambda graph: _node(graph, "mul").meta.update(val=_node(graph, "p_linear_bias").meta["val"]),
        "mul",
        r"has the value f32\[4\] in its metadata, and its operation gives f32\[2, 4\]",
    ),
    "argument": (lambda graph: _node(graph, "mul").update_arg(1, "two"), "mul", "cannot run"),
    "state": (lambda graph: setattr(_node(graph, "p_linear_bias"), "target", "b"), "p_linear_bias", "does not hold"),
    "dead": (lambda graph: _call(graph, _node(graph, "add"), _node(graph, "mul")), "mul_tensor", "is dead"),
    "unmarked": (lambda graph: _node(graph, "add_").meta.pop("writes"), "add_", "is not marked as a write"),
    "no write": (lambda graph: _node(graph, "mul").meta.update(writes="linear"), "mul", "writes nothing"),
    "memory": (lambda graph: _node(graph, "add_").meta.update(writes="gone"), "add_", "the memory of gone"),
}


@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_fault_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, node, problem = PLANTS[kind]

    def planted_pass(graph: fx.Graph) -> None:
        plant(graph)

    monkeypatch.setattr(pass_order, "PASSES", (*pass_order.PASSES, planted_pass))
    message = rf"A bug in pipegraph: planted_pass left a graph in which {node} (.*){problem}"
    with pytest.raises(InvalidGraphError, match=message) as caught:
        pipegraph.capture(Model(), (torch.ones(2, 4),))
    if kind != "state":
        assert re.search(rf"\n  at {re.escape(__file__)}:\d+: \S", str(caught.value))


def test_a_wrong_value_of_an_autocast_region_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cast(Model):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.linear(x)
            return h * 2

    assert pipegraph.capture(Cast(), (torch.ones(2, 4),)).nodes[0].meta["val"].dtype is torch.bfloat16

    def forget_regions(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if "regions" in node.meta:
                node.meta["regions"] = ()

    monkeypatch.setattr(pass_order, "PASSES", (*pass_order.PASSES, forget_regions))
    with pytest.raises(InvalidGraphError, match=r"forget_regions .* linear .* bf16.* f32"):
        pipegraph.capture(Cast(), (torch.ones(2, 4),))


def test_nothing_is_checked_unless_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEGRAPH_VERIFY", "0")
    unmark: Plant = lambda graph: _node(graph, "mul").meta.pop("cut_off")  # noqa: E731
    monkeypatch.setattr(pass_order, "PASSES", (*pass_order.PASSES, unmark))
    pipegraph.capture(Model(), (torch.ones(2, 4),))
