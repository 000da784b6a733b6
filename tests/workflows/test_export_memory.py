"""An export holds one file of tensors at a time, whatever the model's size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pipegraph
from tests.cli.command import program

MIB = 2**20
WIDTH = 1024  # a layer is 4 MiB
LAYERS = 24

MEASURE = """
import sys
from pathlib import Path

from pipegraph.package import Package
from pipegraph.workflows.export import export


def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


run, package, out, shard = sys.argv[1:]
export(run, Package.open(package), out + "-first", 10**12 if shard == "all" else int(shard))  # imports what it needs
Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
before = peak()
export(run, Package.open(package), out, 10**12 if shard == "all" else int(shard))
print(peak() - before)
"""


@pytest.mark.slow
def test_a_rank_holds_one_file_at_a_time(tmp_path: Path) -> None:
    captured = pipegraph.capture(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), (torch.ones(2, WIDTH),)
    )
    package = pipegraph.write_package(pipegraph.plan(captured, points=["12"]), tmp_path / "package")
    pipegraph.Pipeline(package, kernels="eager").save(tmp_path / "run", step=1)

    def growth(shard: object) -> int:
        done = program("-c", MEASURE, tmp_path / "run", package.path, tmp_path / f"out-{shard}", shard)
        assert done.code == 0, done.err
        return int(done.out)

    assert growth("all") > 3 * LAYERS * MIB
    assert growth(9 * MIB) < (9 + 4 + 8) * MIB  # a file, the tensor that is being read, and 8 MiB for all else
