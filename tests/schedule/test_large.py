"""Large schedules take seconds of a core, and little memory."""

import json
import subprocess
import sys

import pytest

from pipegraph.schedule import build, check, lower, names
from tests.slow import cases
from tests.speed import loop_seconds, timed

# In a separate process, so that its high-water mark counts nothing else.
CODE = """
import json, re, resource, sys, time
from pathlib import Path
from pipegraph.schedule import Times, build, check, lower, simulate

ranks, microbatches = map(int, sys.argv[1:])
start = time.process_time()
schedule = build("1f1b", ranks, microbatches)
lowered = lower(schedule)
check(schedule, memory_limit=ranks)
check(lowered)
makespans = [simulate(each, Times.equal(ranks)).makespan for each in (schedule, lowered)]
seconds = time.process_time() - start
status = Path("/proc/self/status")  # ru_maxrss counts the process that this one was forked from
high = re.search(r"VmHWM:\\s+(\\d+)", status.read_text()) if status.exists() else None
peak = int(high[1]) if high else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
actions = [sum(map(len, each.actions)) for each in (schedule, lowered)]
print(json.dumps({"seconds": seconds, "peak": peak, "actions": actions, "makespans": makespans}))
"""
_KIB = 1 if sys.platform == "darwin" else 1024  # bytes in what ru_maxrss counts


@pytest.mark.slow
def test_built_lowered_checked_and_simulated() -> None:
    ranks, microbatches = 128, 512
    arguments = [sys.executable, "-c", CODE, str(ranks), str(microbatches)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    compute, transfers = 2 * ranks * microbatches, 4 * (ranks - 1) * microbatches
    assert figures["actions"] == [compute, compute + transfers]
    assert figures["makespans"] == [3 * (microbatches + ranks - 1)] * 2
    assert figures["seconds"] < 200 * loop_seconds()  # about a fifth of it
    assert figures["peak"] * _KIB < 2**30


# zb-v has the same V of stages, and interleaved-1f1b the same stages of a rank.
SLOW = ("v-min", "v-half", "dualpipe-v", "interleaved-zb")


@pytest.mark.parametrize("name", cases(names(), slow=SLOW))
def test_every_name_lowered_and_checked(name: str) -> None:
    _, loops = timed(lambda: check(lower(build(name, 64, 128)), memory_limit=9999))
    assert loops < 100  # well under 10
