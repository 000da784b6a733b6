"""Whatever a user hands in is taken, or refused with one of pipegraph's errors, and nothing hangs.

Each test tries 200 inputs, or as many as ``PIPEGRAPH_FUZZ`` says where that is set: ``make test-all`` sets 10,000.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz_files import Kind, is_refused_well, kinds, mutated_bytes, mutation, outcome
from pipegraph.cost.balance import parse_balance
from pipegraph.cost.hardware import Hardware
from pipegraph.errors import PipegraphError, PlanError, ScheduleError, SourceError
from pipegraph.graph.partition.split_points import Point, locate
from pipegraph.graph.sources import load
from pipegraph.package import Package
from pipegraph.report.text.run_report import render_trace_report, trace_report_dict
from pipegraph.schedule import Schedule, Times, build, check, from_csv, lower, simulate, to_csv
from pipegraph.schedule.recipes import find_recipe
from pipegraph.tracing.analysis.run_analysis import analyse_run
from pipegraph.tracing.read_run import read_run
from tests.captures import captured
from tests.tracing.recordings import manifest, rows_of, write_run

EXAMPLES = int(os.environ.get("PIPEGRAPH_FUZZ", "200"))
HANG_SECONDS = 10.0  # of a core: an input that takes more would take any time

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
chances = st.integers(0, 2**64).map(random.Random)
patient = pytest.mark.timeout(120 + EXAMPLES)


@contextmanager
def refused_at_most_with(error: type[PipegraphError]) -> Iterator[None]:
    """A context in which one error of pipegraph may be raised, and which does not hang."""
    started = time.process_time()
    with suppress(error):
        yield
    assert time.process_time() - started < HANG_SECONDS


@pytest.fixture(scope="module")
def sound() -> dict[str, Kind]:
    return kinds()


@patient
@pytest.mark.parametrize("name", ["manifest", "plan", "profile"])
@given(chance=chances)
@fuzzed
def test_manifests_plans_and_profiles(name: str, sound: dict[str, Kind], chance: random.Random) -> None:
    kind = sound[name]
    mutant_outcome = outcome(kind, mutation(kind.text, chance))
    assert mutant_outcome.error is None or is_refused_well(kind, mutant_outcome.error), mutant_outcome.error
    assert mutant_outcome.seconds < HANG_SECONDS


def _schedules() -> list[str]:
    overlapped = build("dualpipe-v", 2, 4)
    collectives = from_csv("0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n1UNSHARD,1F0,1B0,1RESHARD,1REDUCE_GRAD\n")
    schedules: list[Schedule] = [build("1f1b", 2, 3), lower(build("zb-v", 2, 3)), overlapped, lower(collectives)]
    return [to_csv(schedule) for schedule in schedules]


SCHEDULES = _schedules()


@patient
@given(text=st.sampled_from(SCHEDULES), chance=chances, transfers=st.booleans())
@fuzzed
def test_csv_files(text: str, chance: random.Random, transfers: bool) -> None:
    if chance.random() < 0.5:
        data = mutated_bytes(text.encode(), chance).decode(errors="replace")
    else:  # cells that are moved, doubled or lost
        lines = [line.split(",") for line in text.splitlines()]
        for _ in range(chance.choice([1, 1, 2, 3])):
            row, other_row = chance.choice(lines), chance.choice(lines)
            cell = chance.choice(["9F9", "0F0", "(0F1;0B0)OVERLAP_F_B", "", "7UNSHARD", *row])
            other_row.insert(chance.randrange(len(other_row) + 1), cell)
            if row and chance.random() < 0.5:
                row.pop(chance.randrange(len(row)))
        data = "\n".join(",".join(line) for line in lines)
    with refused_at_most_with(ScheduleError):
        schedule = from_csv(data, "mine", transfers)
        assert str(schedule)
        check(schedule)
        assert from_csv(to_csv(schedule), "mine") == schedule
        if not schedule.lowered:
            check(lower(schedule))
        simulate(schedule, Times.equal(schedule.stages))


TIMES = json.dumps(
    {"forward": [1.0, 2.0], "input_grad": [1.0, 0.5], "weight_grad": [1.0, 1e-9], "hop": 0.1, "transfer": [0.25]}
)


@patient
@given(chance=chances)
@fuzzed
def test_times(chance: random.Random) -> None:
    with refused_at_most_with(ScheduleError):
        times = Times.from_json(mutation(TIMES, chance).decode(errors="replace"))
        assert simulate(build("1f1b", 2, 2), times).makespan >= 0


READERS: dict[str, tuple[Callable[[str], object], type[PipegraphError]]] = {
    "schedule": (find_recipe, ScheduleError),
    "balance": (parse_balance, PlanError),
    "hardware": (Hardware.load, PipegraphError),
    "package": (Package.open, PipegraphError),
    "model": (lambda text: load(text, weights=False), SourceError),
    "points": (lambda text: locate(captured("tests/models/chain.py"), [Point.parse(text)]), PlanError),
}
PARTS = [
    "layers",
    ".",
    "1",
    ":end",
    ":",
    "/",
    "\\",
    "\0",
    "..",
    "~",
    "hf:",
    ".py",
    ".json",
    "type:",
    "(",
    "\ud800",
    "é",
]
names = st.text(max_size=30) | st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@patient
@pytest.mark.parametrize("kind", READERS)
@given(name=names | names.map(lambda name: name * 1000))
@fuzzed
def test_names(kind: str, name: str) -> None:
    read, error = READERS[kind]
    with refused_at_most_with(error):
        read(name)


STEP = build("1f1b", 2, 2)
SECOND = Times.equal(2, 0.001, 0.001, 0.001, hop=0.0001)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that two ranks recorded."""
    rows = rows_of(STEP, SECOND)
    return write_run(tmp_path_factory.mktemp("recorded"), STEP, {4: rows, 5: rows}, manifest(2, SECOND))


@patient
@given(chance=chances)
@fuzzed
def test_traces(recorded: Path, chance: random.Random) -> None:
    file = chance.choice(sorted(recorded.iterdir()))
    sound, packed = file.read_bytes(), file.suffix == ".gz"
    text = (gzip.decompress(sound) if packed else sound).decode()
    data = mutation(text, chance) if "json" in file.name else mutated_bytes(text.encode(), chance)
    file.write_bytes(gzip.compress(data, 1) if packed else data)
    try:
        with refused_at_most_with(PipegraphError):
            run = read_run(recorded)
            if chance.random() < 0.25:  # advice simulates other schedules, which takes the most time by far
                analysis = analyse_run(run)
                json.dumps(trace_report_dict(analysis))
                assert render_trace_report(analysis)
    finally:
        file.write_bytes(sound)
