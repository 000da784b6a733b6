"""The source of a package: what is imported of it, and how long it stays."""

from __future__ import annotations

import gc
import importlib.util
import linecache
import marshal
import sys
from pathlib import Path

import pytest
import torch

from pipegraph import Pipeline
from pipegraph.errors import PackageError
from pipegraph.package import Package
from tests.messages import refused
from tests.runtime.packages import write
from tests.runtime.sketches import chain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(chain(2), tmp_path / "out")


def test_a_file_that_is_not_listed_is_not_imported(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (folder / "extra.py").write_text(f"open({str(mark)!r}, 'w')\n")
    Package.open(folder).load_stage(0)
    with (folder / "stage_0.py").open("a") as file:
        file.write("\nfrom .extra import mark\n")
    with refused(PackageError, "out/extra.py", "pipeline.json", advice="listed"):
        Package.open(folder).load_stage(0)
    assert not mark.exists()


def test_a_cache_of_other_code_is_not_imported(folder: Path, tmp_path: Path) -> None:
    """Python itself never compares such a file with its source."""
    mark, source = tmp_path / "mark", folder / "stage_0.py"
    cache = Path(importlib.util.cache_from_source(str(source)))
    cache.parent.mkdir()
    code = compile(f"open({str(mark)!r}, 'w')", str(source), "exec")
    unchecked = importlib.util.MAGIC_NUMBER + (0b01).to_bytes(4, "little") + bytes(8)
    cache.write_bytes(unchecked + marshal.dumps(code))
    Package.open(folder).load_stage(0)
    assert not mark.exists()


def test_nothing_stays_of_a_package_that_nobody_uses(folder: Path) -> None:
    def modules() -> list[str]:
        return [name for name in sys.modules if name.startswith("_pipegraph_package")]

    for _ in range(2):  # the first one imports what stays
        Pipeline(folder, kernels="autograd")
    gc.collect()
    modules_before = modules()
    Pipeline(folder, kernels="autograd")
    gc.collect()
    assert modules() == modules_before
    package = Package.open(folder)
    stage = package.load_stage(0)
    assert len(modules()) == len(modules_before) + 3
    del package
    gc.collect()
    assert len(modules()) == len(modules_before) + 3
    assert sys.modules[type(stage).__module__].Stage0 is type(stage)
    del stage
    gc.collect()
    assert modules() == modules_before


def test_the_sources_of_its_graphs_go_with_a_pipeline(folder: Path) -> None:
    """torch.fx keeps them for tracebacks, as long as the process lives."""

    def sources() -> list[str]:
        gc.collect()
        return [name for name in linecache.cache if name.startswith("<eval_with_key>")]

    sources_before = sources()
    pipe = Pipeline(folder, kernels="eager", loss_fn=lambda output, target: output.mean())
    pipe.step(torch.ones(2, 8))
    assert len(sources()) > len(sources_before)
    del pipe
    assert sources() == sources_before
