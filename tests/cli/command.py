"""Calling the command line from a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]


def program(*arguments: object, timeout: float = 100, cwd: Path = ROOT) -> Result:
    """Run ``python *arguments`` in a separate process."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, cwd=cwd, check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)
