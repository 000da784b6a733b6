"""A package is written by the source that the model has now, also in a process that captured an earlier one."""

from __future__ import annotations

import importlib
import linecache
import sys
from pathlib import Path

import pytest
import torch

from pipegraph.codegen.names.source_statements import source_tree
from tests.codegen.parity import source, split

MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        {name} = self.first(x).relu()
        return self.second({name})
"""


def test_a_module_that_was_edited_and_imported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_model.py"
    for name in ("hidden", "activated"):
        file.write_text(MODEL.format(name=name))
        importlib.invalidate_caches()
        sys.modules.pop("edited_model", None)
        model = importlib.import_module("edited_model").Model()
        package = split(tmp_path, model, (torch.ones(2, 4),), cut="second")
        assert f"def forward(self, {name}: Tensor)" in source(package)


def test_a_cell_of_a_notebook_has_a_source() -> None:
    lines = ["x = 1\n"]
    linecache.cache["<cell 1>"] = (6, None, lines, "<cell 1>")
    tree = source_tree("<cell 1>")
    assert len(tree.body) == 1
    assert source_tree("<cell 1>") is tree


@pytest.mark.parametrize("text", [None, "def f(:"])
def test_what_cannot_be_read_is_empty(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    if text is not None:
        file.write_text(text)
    tree = source_tree(str(file))
    assert tree.body == []
    assert source_tree(str(file)) is tree  # what is known of a tree is kept
