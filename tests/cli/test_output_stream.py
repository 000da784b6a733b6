"""stdout that cannot be written: who closed it hears nothing more, and a full device is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import ROOT

SCHEDULE = ("schedule", "1f1b", "--ranks", "2", "--microbatches", "2")


def started(*arguments: object, stdout: int) -> tuple[int, str]:
    """The exit code and stderr of a command that writes its stdout to a file descriptor."""
    command = [sys.executable, "-m", "pipegraph", *map(str, arguments)]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=100, check=False)
    return done.returncode, done.stderr


def closed_pipe() -> int:
    """The writing end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("arguments", [SCHEDULE, (*SCHEDULE, "--json"), ("--help",)])
def test_a_closed_pipe_ends_a_command_without_a_word(arguments: tuple[str, ...]) -> None:
    assert started(*arguments, stdout=closed_pipe()) == (141, "")


def test_a_closed_pipe_ends_a_run_of_several_processes_without_a_word(chain: Path) -> None:
    assert started("run", chain, "--kernels", "eager", stdout=closed_pipe()) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [SCHEDULE, ("--version",)])
def test_a_full_device_is_named(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        code, message = started(*arguments, stdout=full.fileno())
    assert code == 2
    assert message.startswith("error: stdout cannot be written: No space left on device.\nTry: ")
