"""Ctrl-C while ranks meet and connect ends a rank at once, and not after the timeout."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.packages import write
from tests.runtime.sketches import chain

SCRIPT = """
import sys
from pipegraph import Pipeline

sys.stdout.write("ready\\n")
sys.stdout.flush()
Pipeline(sys.argv[1], kernels="autograd", loss_fn=lambda output, target: output.mean(), timeout=600)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_the_other_is_interrupted(rank: int, tmp_path: Path) -> None:
    package, script = write(chain(2), tmp_path / "package"), tmp_path / "rank.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = subprocess.Popen(
        [sys.executable, script, package],
        env={**os.environ, **ranks},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
