"""What Inductor left in its cache when its process was killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from torch import fx

from pipegraph.kernels import internals
from pipegraph.kernels.compilers import compile_graphs


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

    def compile_graph(module: fx.GraphModule) -> internals.Run:
        tries.append(module)
        if file.exists():
            raise RuntimeError(f"Failed to import {file}\nSyntaxError: '(' was never closed (abc.py, line 1)")
        return run

    monkeypatch.setattr(internals, "compile_graph", compile_graph)
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
