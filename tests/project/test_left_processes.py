"""A process that a test leaves is found, also if the one that started it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.left_processes import left_processes


def test_an_orphan_is_found_until_it_ends() -> None:
    sleep = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)"
    start = f"import subprocess, sys; print({sleep}.pid)"
    done = subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, check=True, timeout=60)
    orphan = int(done.stdout)
    assert [process.partition(":")[0] for process in left_processes(patience=0)] == [str(orphan)]
    os.kill(orphan, signal.SIGKILL)
    assert left_processes() == []
