"""Changes of shape that a person would not write are dropped; those that something could see stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph

Function = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def operations(function: Function) -> list[str]:
    """What is left of a function of f32[2, 3, 4], which computes the same."""
    x = torch.arange(24.0).view(2, 3, 4)
    captured = pipegraph.capture(Model(function), (x.clone(),))
    values: dict[torch.fx.Node, Tensor] = {captured.inputs[0]: x}
    constants = {node: captured.tensors[str(node.target)] for node in captured.graph.nodes if node.op == "get_attr"}
    for node in captured.nodes:
        arguments, named = torch.fx.map_arg((node.args, node.kwargs), lambda node: (values | constants)[node])
        values[node] = node.target(*arguments, **named)  # type: ignore[operator]
        assert values[node].shape == node.meta["val"].shape
    torch.testing.assert_close(values[captured.returned[0]], function(x.clone()))
    return [node.target._opname for node in captured.nodes]  # type: ignore[union-attr]


def attention(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)


def in_place(x: Tensor) -> Tensor:
    y = x.exp()
    y.view(2, 3, 4)[0] = 1.0
    return y


def copied_first(x: Tensor) -> Tensor:
    y = x.exp()
    z = y.transpose(0, 1).contiguous().view(6, 4)
    y[0] = 1.0
    return z


def expanded_first(x: Tensor) -> Tensor:
    y = x.sum(0, keepdim=True)
    z = y.expand(2, 3, 4)
    y[0, 0] = 1.0
    return z * x


def written(x: Tensor) -> Tensor:
    y = x.new_empty(2, 3, 4)
    y[:, :1] = x[:1, :1].exp().expand(2, 1, 4)
    y[:, 1:] = x[:, 1:]
    return y


INDICES = ["select", "select", "to", "clamp", "select"]
ATTENTION = ["unsqueeze", "unsqueeze", "unsqueeze", "scaled_dot_product_attention"]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        # back to the original shape
        (lambda x: x.view(2, 3, 4).exp(), ["exp"]),
        (lambda x: x.transpose(1, 2).transpose(2, 1).exp(), ["exp"]),
        (lambda x: x.unsqueeze(1).squeeze(1).exp(), ["exp"]),
        (lambda x: x.flatten(1).view(x.shape).exp(), ["exp"]),
        (lambda x: x.flatten(1).view(2, 3, 4).exp(), ["flatten", "view", "exp"]),  # another shape if x has another
        (lambda x: x.transpose(0, 1).permute(1, 2, 0).exp(), ["transpose", "permute", "exp"]),
        (lambda x: x.transpose(0, 1).reshape(2, 3, 4).exp(), ["transpose", "reshape", "exp"]),
        # copies
        (lambda x: x.transpose(0, 1).contiguous().view(6, 4), ["transpose", "reshape"]),
        (lambda x: x.transpose(0, 1).contiguous().flatten(), ["transpose", "flatten"]),
        (lambda x: x.transpose(0, 1).contiguous().exp(), ["transpose", "contiguous", "exp"]),
        (lambda x: x.transpose(0, 1).contiguous().view(3, 2, 2, 2), ["transpose", "contiguous", "view"]),
        # heads
        (lambda x: x.unsqueeze(2).expand(2, 3, 5, 4).reshape(2, 15, 4), ["repeat_interleave"]),
        (lambda x: x.unsqueeze(1).expand(2, 5, 3, 4).reshape(2, 15, 4), ["unsqueeze", "expand", "reshape"]),
        (
            lambda x: x[:, :1].unsqueeze(2).expand(2, 1, 5, 4).reshape(2, 5, 4),
            ["slice", "unsqueeze", "expand", "reshape"],
        ),
        # masks
        (lambda x: attention(x, x[0, :, :3].expand(2, 1, 3, 3)), ["select", "slice", *ATTENTION]),
        (lambda x: attention(x, x[:1, :, :3].expand(2, 1, 3, 3)), ["slice", "slice", "expand", *ATTENTION]),
        (lambda x: x + x[0].exp().expand(2, 3, 4), ["select", "exp", "add"]),
        (lambda x: x[0].exp().expand(2, 3, 4), ["select", "exp", "expand"]),
        (lambda x: (x[0].expand(2, 3, 4) + 1).sum(0) * x, ["select", "expand", "add", "sum", "mul"]),
        (lambda x: x + F.embedding(x[0, :, 0].long().clamp(0, 1).expand(2, 3), x[0]), [*INDICES, "embedding", "add"]),
        (
            lambda x: x + F.embedding(x[0, :, 0].long().clamp(0, 1), x[0, :1].expand(2, 4)),
            [*INDICES, "slice", "expand", "embedding", "add"],
        ),
        (lambda x: F.dropout(x[0].expand(2, 3, 4), 0.0), ["select", "expand"]),
        # a tensor without dimensions, which leaves a result's dtype alone
        (lambda x: x + x[0, 0, 0].double().expand(4), ["select", "select", "select", "to", "expand", "add"]),
        (lambda x: x + x[0, 0, 0].expand(4), ["select", "select", "select", "add"]),
        # what is written, and what is written into
        (written, ["new_empty", "slice", "slice", "exp", "slice", "copy_", "slice", "slice", "copy_"]),
        (in_place, ["exp", "view", "select", "fill_"]),
        (copied_first, ["exp", "transpose", "contiguous", "view", "select", "fill_"]),
        (expanded_first, ["sum", "expand", "select", "select", "fill_", "mul"]),
    ],
)
def test_what_is_left(function: Function, left: list[str]) -> None:
    assert operations(function) == left
