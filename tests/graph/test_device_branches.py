"""Code that depends on the kind of device is shown at capture, with its line."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from tests.codegen.layers import batch


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


class Same(Half):
    """What torch itself chooses by the device is no branch; nor is a question without consequences."""

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
        (Half, r"relu at test_device_branches.py:28 on cpu, and calls half at test_device_branches.py:27 on cuda"),
        (Unmasked, r"calls \S+ at test_device_branches.py:37 on cpu, and ends on cuda"),
    ],
)
def test_a_branch_is_shown_with_its_line(model: type[nn.Module], shown: str) -> None:
    with pytest.warns(UserWarning, match=shown):
        pipegraph.capture(model(), (batch(),))


@pytest.mark.parametrize("model", [Same, Moves])
def test_what_is_no_branch_is_not_shown(model: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipegraph.capture(model(), (batch(),))
