"""Where a model may be cut, and what crosses there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.cost.segments.chain import Chain, find_chain
from tests.cost.models import model


def names(chain: Chain) -> list[str]:
    return [str(segment.point or "") for segment in chain.segments]


def chain_of(module: nn.Module, *inputs: Tensor, inside_layers: bool = True) -> Chain:
    return find_chain(pipegraph.capture(module, inputs), inside_layers)


LAYERS = ["", "layers.1", "layers.2", "layers.3", "head"]


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("tests.models.chain", LAYERS),  # not between a linear layer and its tanh
        ("tests.models.batch_norm", LAYERS),
        ("tests.models.dropout", LAYERS),
        # Not between qkv and attention, nor up and down, where more crosses.
        ("decoder", ["", *(f"layers.{i}{suffix}" for i in range(3) for suffix in ("", ".out", ".inner_norm")), "head"]),
    ],
)
def test_points(name: str, points: list[str]) -> None:
    assert names(find_chain(model(name))) == points


def test_a_chain_has_no_gap_and_its_layers_are_the_models() -> None:
    captured = model("decoder")
    chain = find_chain(captured)
    assert chain.segments[0].start == 0
    assert all(segment.stop == next_.start for segment, next_ in zip(chain.segments, chain.segments[1:], strict=False))
    assert chain.nodes(0, len(chain.segments)) == captured.nodes
    assert [len(layer) for layer in chain.layers] == [1, 3, 3, 3, 1]
    assert names(find_chain(captured, inside_layers=False)) == ["", "layers.0", "layers.1", "layers.2", "head"]


def test_bytes_that_cross_a_plain_chain() -> None:
    chain = find_chain(model("tests.models.chain"))
    assert [segment.boundary_bytes for segment in chain.segments] == [4 * 8 * 4] * 4 + [0]  # [4, 8] in float32
    assert [segment.gradient_bytes for segment in chain.segments] == [4 * 8 * 4] * 4 + [0]


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        return self.layers[3](self.layers[2](second) + second) + first


def test_a_skip_connection_crosses_every_cut_on_its_way() -> None:
    chain = chain_of(Skips(), torch.randn(4, 8))
    assert names(chain) == ["", "layers.1", "layers.2", "layers.3"]
    tensor_size = 4 * 8 * 4
    # first; first and second; first and their sum; nothing.
    assert [segment.boundary_bytes for segment in chain.segments] == [tensor_size, 2 * tensor_size, 2 * tensor_size, 0]


def test_no_gradient_comes_back_for_what_has_none() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
            self.first.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x)))

    chain = chain_of(Frozen(), torch.randn(4, 8))
    assert [(part.boundary_bytes, part.gradient_bytes) for part in chain.segments] == [(128, 0), (128, 128), (0, 0)]


def test_half_precision_halves_what_crosses() -> None:
    chain = chain_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16(), torch.randn(4, 8).bfloat16())
    assert [segment.boundary_bytes for segment in chain.segments] == [4 * 8 * 2, 0]


@pytest.mark.parametrize(
    "module",
    [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.ReLU(), nn.Tanh())],
    ids=["one layer", "one heavy operation", "no parameters"],
)
def test_models_without_a_cut(module: nn.Module) -> None:
    (segment,) = chain_of(module, torch.randn(4, 8)).segments
    assert (segment.point, segment.begins_layer, segment.boundary_bytes) == (None, True, 0)


def test_a_cut_that_is_kept_in_any_case() -> None:
    captured = model("tests.models.chain")
    tanh = next(index for index, node in enumerate(captured.nodes) if "tanh" in str(node.target))
    assert names(find_chain(captured, cut_positions=[tanh]))[:3] == ["", "layers.0.0:end", "layers.1"]
