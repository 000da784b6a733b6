"""Models that read no dtype are exported in one dtype; the marks are those of a second export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.graph.export import other_dtype
from pipegraph.graph.export.dtype_reads import DtypeReads
from pipegraph.graph.export.torch_export import export_in
from pipegraph.graph.model_structure import modes_of


class Layer(nn.Module):
    """What a subclass computes from the output of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.computed(self.linear(x))

    def computed(self, x: Tensor) -> Tensor:
        return F.gelu(x) * self.scale


class Positions(Layer):
    """The default dtype stays when the model is converted."""

    def computed(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], device=x.device)[:, None] * torch.linspace(0.0, 1.0, 8, device=x.device)


class Loop(Layer):
    def computed(self, x: Tensor) -> Tensor:
        for _ in range(3):
            previous = x
            x = torch.tanh(x) + previous
        return x


class Recurrent(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def computed(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Attention(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def computed(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class MaskedAttention(Attention):
    def computed(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class Cast(Layer):
    def computed(self, x: Tensor) -> Tensor:
        return x.float().softmax(-1).type_as(x)


class Factory(Layer):
    def computed(self, x: Tensor) -> Tensor:
        return x + torch.zeros(8, dtype=x.dtype, device=x.device)


class Branch(Layer):
    """Leaves no trace in a graph: it takes the other branch in another dtype."""

    def computed(self, x: Tensor) -> Tensor:
        return x if x.dtype == torch.float32 else x.softmax(-1)


READS = [(MaskedAttention, True), (Cast, True), (Factory, True), (Branch, True)]
NO_READS = [(Layer, False), (Positions, False), (Loop, False), (Recurrent, False), (Attention, False)]


@pytest.mark.parametrize(("model_class", "reads"), [*READS, *NO_READS])
def test_reads_of_dtypes_are_noticed(model_class: type[Layer], reads: bool) -> None:
    model = model_class()
    with DtypeReads() as noticed:
        export_in(modes_of(model).training, model, (torch.randn(2, 5, 8),), {})
    assert noticed.has_reads is reads


def marks(model: nn.Module) -> list[Any]:
    graph = pipegraph.capture(model, (torch.randn(2, 5, 8),)).graph
    keys = ("other_dtype", "relative_dtype", "relative_numbers", "argument_of", "variables")
    return [
        (node.name, str(node.target), str(node.args), {key: node.meta.get(key) for key in keys}) for node in graph.nodes
    ]


@pytest.mark.parametrize("model_class", [model_class for model_class, _ in NO_READS])
def test_marks_are_those_of_a_second_export(model_class: type[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = model_class()
    computed = marks(model)
    monkeypatch.setattr(other_dtype, "_may_change_dtype", lambda node: True)
    assert marks(model) == computed
    assert any(mark["other_dtype"] == torch.bfloat16 for *_, mark in computed)


class ForExporters(nn.Module):
    """Does something else for exporters, as models of transformers do."""

    def __init__(self, is_traceable: bool) -> None:
        super().__init__()
        self.linear, self.is_traceable = nn.Linear(8, 8), is_traceable

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if torch.compiler.is_exporting():
            return x * 2
        if not self.is_traceable and x.sum() > 1e9:
            return x
        return x + x


def test_the_graph_has_what_is_trained_and_not_what_is_exported() -> None:
    def operators(model: nn.Module) -> list[str]:
        return [str(node.target) for node in pipegraph.capture(model, (torch.randn(2, 8),)).nodes]

    assert operators(ForExporters(is_traceable=True))[-1] == "aten.add.Tensor"
    assert operators(ForExporters(is_traceable=False))[-1] == "aten.mul.Tensor"
    assert not torch.compiler.is_exporting()
