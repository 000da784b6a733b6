"""A separate TensorBoard for a test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PATIENCE: Final = 60.0
"""Seconds that a server may take to start, or to end."""


@contextmanager
def tensorboard(folder: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of a TensorBoard on a folder, which writes its messages to ``log``.

    At the end it and all that it has started are gone: its data server and the workers of its plugins outlive it
    otherwise.
    """
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", *options]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--port", "0"], stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
    try:
        yield _address(log, process)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + PATIENCE
    while (address_match := re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())) is None:
        assert process.poll() is None and time.monotonic() < deadline, f"TensorBoard does not start: {log.read_text()}"
        time.sleep(0.1)
    return address_match[0]
