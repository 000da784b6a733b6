"""Inductor's cache: what was compiled before is found, and what a killed process left there is removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from pipegraph.kernels import compilers
from pipegraph.kernels.compilers import compile_graphs
from pipegraph.torch_private.fake_tensors import fake_tensors
from pipegraph.torch_private.tracing import Run, trace


def test_a_graph_that_was_compiled_before_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of matrices alone: it needs no C++ compiler."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def product(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x @ y]

    hits_before = counters["inductor"]["fxgraph_cache_hit"]
    x, y = torch.ones(2, 3), torch.full((3, 4), 2.0)
    for hits in (0, 1):
        with fake_tensors():
            module = trace(product, (torch.empty(2, 3), torch.empty(3, 4)), None)
        (run,) = compile_graphs([module])
        assert not isinstance(run, Exception)
        assert run([x, y])[0].eq(6).all()
        assert counters["inductor"]["fxgraph_cache_hit"] == hits_before + hits


@pytest.mark.parametrize("case", ["damaged", "written since", "another's"])
def test_a_damaged_file_of_the_cache_is_removed_and_compiled_again(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    file = (tmp_path if case == "another's" else cache) / "abc.py"
    file.write_text("def call(")
    age = -60 if case == "written since" else 60
    os.utime(file, (time.time() - age,) * 2)
    tries = []

    def run(inputs: object) -> list[object]:
        return []

    def compile_graph(module: fx.GraphModule) -> Run:
        tries.append(module)
        if file.exists():
            raise RuntimeError(f"Failed to import {file}\nSyntaxError: '(' was never closed (abc.py, line 1)")
        return run

    monkeypatch.setattr(compilers, "compile_graph", compile_graph)
    graph = fx.Graph()
    graph.output(())
    (result,) = compile_graphs([fx.GraphModule({}, graph)])
    if case == "damaged":
        assert result is run
        assert len(tries) == 2
    else:
        assert isinstance(result, RuntimeError)
        assert file.exists()
        assert len(tries) == 1
