"""Calling the command line from a test."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHAIN = "tests/models/chain.py"  # from the root


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


def fails(result: Result, code: int, *texts: str) -> None:
    """The command ended with ``code``, printed no result and no traceback, and its message says all of ``texts``."""
    assert result.code == code, result
    assert result.out == ""
    # torch built for CUDA warns on a machine without: "No CUDA runtime is found".
    torch_warnings = r"(?:W\d{4} \d\d:\d\d:.*\n)*"
    assert re.match(rf"{torch_warnings}error: ", result.err), result.err
    assert "Traceback" not in result.err
    for text in texts:
        assert text in result.err
