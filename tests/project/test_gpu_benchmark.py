"""The benchmark of a GPU: on a CPU it measures the same, but for CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import kernels
from benchmarks.gpu.setting import Setting


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A layer of width 64, in bfloat16."""
    folder = tmp_path_factory.mktemp("gpu")
    return Setting(torch.device("cpu"), 1, 64, 2, 16, rounds=2, profile_names=(), folder=folder)


@pytest.mark.slow  # it compiles each kernel several times
@pytest.mark.timeout(600)
def test_a_report_has_every_table(setting: Setting) -> None:
    title, times, memory, steps, blocks, graphs = command.report([setting], seconds=0.1)
    assert title.startswith("## ") and "1 layer of width 64, 2 × 16 tokens, bfloat16" in title
    for text, names in ((times, ("torch.compile", "F I W", "F B")), (steps, ("min-cut", "offload"))):
        rows = [line.split("|")[1:-1] for line in text.splitlines()[4:]]
        assert [row[0].strip() for row in rows] == [*names]
        assert all(float(row[1]) > 0 for row in rows)
    assert "1.000 (1.000 – 1.000)" in times.splitlines()[4]
    assert len(memory.splitlines()) == 5
    assert len(blocks.splitlines()) > 5 and "the roofline of cpu" in blocks
    assert "Not measured" in graphs


@pytest.mark.slow
def test_what_f_keeps_is_what_was_predicted(setting: Setting) -> None:
    saved_memory = kernels.saved_memory(setting)
    assert saved_memory.allocated is None
    assert saved_memory.counted == pytest.approx(saved_memory.predicted, rel=0.05)


def test_without_a_gpu_it_says_what_to_try() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(SystemExit, match="--device cpu"):
        command.main(length=None, profile=None, out=None)
