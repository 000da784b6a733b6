"""Code that depends on the kind of device is shown at capture, with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.cli import main
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
        (Half, r"calls relu at {file}:\d+ on cpu, and calls half at {file}:\d+ on cuda"),
        (Unmasked, r"calls \S+ at {file}:\d+ on cpu, and ends on cuda"),
        (Same, ""),
        (Moves, ""),
    ],
)
def test_a_branch_is_shown_with_its_lines(model: type[nn.Module], shown: str) -> None:
    found = pipegraph.capture(model(), (batch(),)).device_branch
    assert re.fullmatch(shown.format(file=r"test_device_branches\.py"), found)


def test_split_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\nfrom tests.graph.test_device_branches import Half\n\n"
        "model, example_inputs = nn.Sequential(Half(), Half()), (torch.randn(3, 8),)\n"
    )
    with pytest.raises(SystemExit, match="0"):
        main(["split", str(tmp_path / "model.py"), "--points", "1", "-o", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert re.search(r"The model calls relu at \S+ on cpu, and calls half at \S+ on cuda\. The stages", printed)
