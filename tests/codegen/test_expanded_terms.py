"""Validation: an elementwise operation of an expanded tensor is the operation of the tensor, expanded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipegraph.codegen import package_files
from pipegraph.codegen.package_files import generate
from tests.codegen.parity import differences, plan_of, source, write


def segment_sum(x: Tensor) -> Tensor:
    """Sums of all segments, over a mask of two dimensions."""
    length = x.size(-1)
    x = x[..., None].expand(*x.size(), length)
    mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(diagonal=-1)
    return x.masked_fill(~mask, 0).cumsum(dim=-2)


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 6)
        self.kinds = nn.Embedding(3, 8)
        self.register_buffer("kind", torch.zeros(1, 16, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        kinds = self.kind[:, : x.shape[1]].expand(x.shape[0], x.shape[1])
        x = x + self.kinds(kinds)
        sums = segment_sum(self.proj(x))
        keeps = (x.mean(-1) > 0).expand(1, *x.shape[:-1])
        return x + torch.where(~keeps, sums.sum((-1, -2)), 0.5).sum(0).unsqueeze(-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Segments(), Segments(), Segments()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


INPUTS = (torch.randn(3, 5, 8),)


def test_a_text_that_expands_first_is_kept(tmp_path: Path) -> None:
    model = Model()
    plan = plan_of(model, INPUTS, cut="layers.1")
    assert not generate(plan).proof.reasons
    package = write(tmp_path, plan)
    assert differences(package, model, INPUTS) == []
    text = source(package)
    assert "x = x[..., None].expand(*x.size(), length)" in text
    assert "x = x + self.kinds(kinds)" in text
    assert "sums = segment_sum(self.proj(x))" in text


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("x.masked_fill(~mask, 0)", "x.masked_fill(mask, 0)"),
        (".expand(*x.size(), length)", ".expand(*x.size(), length).mT"),
        (".expand(x.shape[0], x.shape[1])", ".expand(x.shape[0], x.shape[1]) + 1"),
        ("expand(1, *x.shape[:-1])", "expand(3, *x.shape[:-1])"),
    ],
)
def test_a_wrong_text_that_expands_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    plan, files_of = plan_of(Model(), INPUTS, cut="layers.1"), package_files._files
    texts: list[str] = []

    def changed(*arguments: object) -> dict[str, str]:
        files = files_of(*arguments)  # type: ignore[arg-type]
        texts.append(files["blocks.py"])
        return {name: text.replace(right, wrong) for name, text in files.items()}

    monkeypatch.setattr(package_files, "_files", changed)
    proof = generate(plan).proof
    assert right in texts[0]
    assert right not in texts[-1]
    assert proof.reasons
