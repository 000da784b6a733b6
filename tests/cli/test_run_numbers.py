"""``pipegraph run``: the precision of numbers, and the seed of random ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.cli.test_run import AUTOGRAD, losses


def test_precision_and_seed(pipegraph: Command, chain: Path) -> None:
    own, half = (pipegraph("run", chain, *AUTOGRAD, "--seed", 1, *more) for more in ((), ("--precision", "bf16")))
    assert (own.code, half.code) == (0, 0), (own, half)
    (exact,), (rounded,) = losses(own.out), losses(half.out)
    assert exact != rounded and float(rounded) == pytest.approx(float(exact), rel=0.05)
    wrong = pipegraph("run", chain, "--nproc", 1, *AUTOGRAD, "--precision", "bf61")
    assert wrong.code == 2 and "bf16" in wrong.err


def test_a_learning_rate_is_a_number(pipegraph: Command, chain: Path) -> None:
    done = pipegraph("run", chain, "--nproc", 1, *AUTOGRAD, "--learning-rate", "inf")
    assert done.code == 2 and "inf is no learning rate" in done.err
