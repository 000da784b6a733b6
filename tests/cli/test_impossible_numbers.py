"""Numbers that no machine, schedule or float can have, and options that belong to others: refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.command import CHAIN, Command, fails


def test_the_device_of_a_split(pipegraph: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (("--points", "layers.2"), ("--stages", 2)):
        assert pipegraph("split", CHAIN, *where, "--device", "cpu", "--dry-run").code == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    fails(pipegraph("split", CHAIN, "--stages", 2, "--device", "cuda"), 2, "belongs to --balance measured and auto")


@pytest.mark.parametrize("stages", [10**7, 10**23])
def test_more_stages_than_a_schedule_can_have(pipegraph: Command, stages: int) -> None:
    fails(pipegraph("split", CHAIN, "--stages", stages, "--dry-run"), 2, f"{stages} stages", "250,000 stages or fewer")


def test_more_rows_than_there_is_memory(pipegraph: Command, chain: Path) -> None:
    rows = ("--batch", 10**14)
    run = ("run", chain, "--nproc", 1, "--model", CHAIN)
    for command in (("split", CHAIN, "--stages", 2, "--dry-run"), run, ("split", "hf:tests/models/tied_llama")):
        stages = ("--stages", 2) if "--stages" not in command and command[0] == "split" else ()
        fails(pipegraph(*command, *stages, *rows), 2, f"with --batch {10**14}", "and this machine has")


@pytest.mark.parametrize("dimension", ["--dp-replicate", "--dp-shard"])
def test_more_processes_than_a_machine_can_start(pipegraph: Command, chain: Path, dimension: str) -> None:
    fails(pipegraph("run", chain, dimension, 100_000), 2, "200,000 processes cannot be started", "Try: a smaller mesh")


def test_a_learning_rate_that_no_float_holds(pipegraph: Command, chain: Path) -> None:
    fails(pipegraph("run", chain, "--nproc", 1, "--learning-rate", "1e300"), 2, "1e+300 is not a learning rate")
