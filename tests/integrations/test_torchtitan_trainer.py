"""torchtitan's trainer, its debug model and its checkpoints with pipegraph's stages: losses are those of one process.

torchtitan 0.3 cannot be installed next to transformers 5, and these tests run where it is there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import ROOT

pytest.importorskip("torchtitan")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_STEP = re.compile(r"(validate )?step: +(\d+) +loss: +([\d.]+)(?: +grad_norm: +([\d.]+))?")


def run(ranks: int, out: Path, tweak: str = "") -> dict[str, tuple[float, ...]]:
    """Return the loss and the gradient norm of each step, and the loss of each validation, as they are logged."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = ["-m", "tests.integrations.torchtitan_on_cpu", str(out), tweak]
    done = subprocess.run([sys.executable, *torchrun, *script], capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-5000:]
    log = re.sub(r"\x1b\[[\d;]*m", "", done.stderr + done.stdout)
    assert "left to autograd" not in log
    return {
        f"{match[1] or ''}{match[2]}": tuple(float(number) for number in match.groups()[2:] if number)
        for match in _STEP.finditer(log)
    }


def check(actual: dict[str, tuple[float, ...]], expected: dict[str, tuple[float, ...]]) -> None:
    for step, numbers in actual.items():  # four digits of a norm are logged
        assert numbers == pytest.approx(expected[step], rel=1e-4, abs=1.5e-4), step


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    """Of the same seed checkpoint, with accumulation and validation; a run resumes with other cuts."""
    run(1, tmp_path / "seed", "config.checkpoint.create_seed_checkpoint = True")
    load = f"config.checkpoint.initial_load_path = {str(tmp_path / 'seed/checkpoint/step-0')!r}\n"
    steps = "config.validator.steps = "
    expected = run(1, tmp_path / "one", f"{load}{steps}4")
    assert len(expected) == 7
    two = run(2, tmp_path / "two", f"{load}{steps}4\nconfig.parallelism.pipeline_parallel_schedule = '1F1B'")
    assert len(two) == 7
    check(two, expected)
    four = run(4, tmp_path / "four", f"{load}{steps}2")
    assert len(four) == 7
    check(four, expected)
    shutil.rmtree(tmp_path / "four/checkpoint/step-4")
    cuts = "config.parallelism.pipeline_parallel_layers_per_stage = 2\n"
    resumed = run(4, tmp_path / "four", f"{cuts}{steps}2")
    assert set(resumed) == {"4", "validate 4"}
    check(resumed, expected)
