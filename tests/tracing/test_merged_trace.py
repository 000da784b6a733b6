"""One trace of all ranks, read strictly."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pipegraph.errors import PipegraphError
from pipegraph.schedule import Times, build
from pipegraph.tracing.merged_trace import COMPUTE, RECEIVES, SENDS, merge_traces
from pipegraph.tracing.read_run import read_run
from tests.messages import refused
from tests.tracing.chrome import read_strictly, slices
from tests.tracing.recordings import DIGITS, event, manifest, rows_of, write_run

TIMES = Times.equal(4, 0.001, 0.001, 0.001, hop=0.0001)
SCHEDULE = build("zb-v", 2, 4)
ROWS = rows_of(SCHEDULE, TIMES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(
        tmp_path / "run", SCHEDULE, {1: ROWS, 2: ROWS}, manifest(4, TIMES), offsets=[0.0, 0.25], error=3e-6
    )


def names(trace: dict[str, Any], event_name: str) -> dict[tuple[int, int], str]:
    events = [event for event in trace["traceEvents"] if event["ph"] == "M" and event["name"] == event_name]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events}


def test_a_process_per_rank_and_a_thread_per_direction(folder: Path, tmp_path: Path) -> None:
    run, file = read_run(folder), tmp_path / "trace.json.gz"
    merged = merge_traces([run], file, run.prediction and run.prediction.timeline)
    trace = read_strictly(file)
    assert list(names(trace, "process_name").values()) == [
        "rank 0: stages 0, 3",
        "predicted rank 0: stages 0, 3",
        "rank 1: stages 1, 2",
        "predicted rank 1: stages 1, 2",
    ]
    threads = names(trace, "thread_name")
    assert [threads[1, number] for number in (COMPUTE, SENDS, RECEIVES)] == ["compute", "sends", "receives"]
    assert [span["name"] for span in slices(trace, 1, COMPUTE)][:2] == [
        "F stage 1 microbatch 0",
        "F stage 2 microbatch 0",
    ]
    assert slices(trace, 0, SENDS)[0]["name"] == "SEND_F stage 0 microbatch 0 to stage 1"
    assert slices(trace, 1, RECEIVES)[0]["name"] == "RECV_F stage 1 microbatch 0 from stage 0"
    transfers = sum(action.action.kind.is_transfer for row in ROWS for action in row)
    assert merged.flows == transfers  # of two steps, one for each pair
    assert (merged.left_out, merged.early) == (0, 0)


def test_arrows_lead_from_a_send_to_its_receive(folder: Path, tmp_path: Path) -> None:
    merge_traces([read_run(folder)], tmp_path / "trace.json")
    trace = read_strictly(tmp_path / "trace.json")
    first, last = (next(event for event in trace["traceEvents"] if event["ph"] == phase) for phase in "sf")
    assert (first["pid"], first["tid"], last["pid"], last["tid"]) == (0, SENDS, 1, RECEIVES)
    assert last["ts"] - first["ts"] == pytest.approx(100, abs=0.01)  # the hop, in microseconds


def test_ranks_are_on_one_clock_with_its_error(folder: Path, tmp_path: Path) -> None:
    merge_traces([read_run(folder)], tmp_path / "trace.json")
    trace = read_strictly(tmp_path / "trace.json")
    starts = [slices(trace, rank, COMPUTE)[0]["ts"] for rank in range(2)]
    assert starts[1] - starts[0] == pytest.approx(1100, abs=0.01)
    assert trace["pipegraph"]["clocks"] == {
        "0": {"offset_ns": 0, "error_ns": 0},
        "1": {"offset_ns": 250_000_000, "error_ns": 3000},
    }
    labels = [event["args"]["labels"] for event in trace["traceEvents"] if event["name"] == "process_labels"]
    assert labels == ["rank 0's clock", "clock 250 ms, ± 3 µs"]


def test_the_predicted_step_starts_with_each_measured_one(tmp_path: Path) -> None:
    schedule = build("1f1b", 2, 2)
    slow = manifest(2, Times.equal(2, 0.004, 0.004, 0.004))  # predicted four times too long: steps overlap
    rows = rows_of(schedule, Times.equal(2, 0.001, 0.001, 0.001))
    run = read_run(write_run(tmp_path / "run", schedule, {1: rows, 2: rows}, slow, gap=0.001))
    merge_traces([run], tmp_path / "trace.json", run.prediction and run.prediction.timeline)
    trace = read_strictly(tmp_path / "trace.json")
    measured = [span["ts"] for span in slices(trace, 0, COMPUTE) if span["name"] == "F stage 0 microbatch 0"]
    threads = [thread for process, thread in names(trace, "thread_name") if process == 2]
    assert len(threads) == 2
    assert [slices(trace, 2, thread)[0]["ts"] for thread in threads] == measured


def operation(name: str, start: float, length: float, category: str = "cpu_op", thread: int = 1) -> dict[str, Any]:
    times = {"ts": 1e6 + start * 1e3, "dur": length * 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": {}}


def test_operations_stand_below_their_action(tmp_path: Path) -> None:
    schedule = build("1f1b", 1, 2)
    rows = [[event(name, n / 1000, (n + 1) / 1000) for n, name in enumerate(("0F0", "0B0", "0F1", "0B1"))]]
    extra = [
        operation("inner", 0.1, 0.2),
        operation("inmost", 0.15, 0.1),
        operation("around", -0.5, 5),
        operation("across two actions", 0.5, 1),
        operation("into an action", -0.2, 0.5),
        operation("elsewhere", 0.3, 9, thread=7),
        operation("gemm", 0.4, 0.3, "kernel", thread=20),
        operation("not a slice of Perfetto's", 0.4, 0.3, "Trace"),
    ]
    folder = write_run(tmp_path / "run", schedule, {1: rows}, extra=extra)
    assert merge_traces([read_run(folder)], tmp_path / "few.json").slices == 4
    merged = merge_traces([read_run(folder)], tmp_path / "trace.json", operations=True)
    trace = read_strictly(tmp_path / "trace.json")
    below = [span["name"] for span in slices(trace, 0, COMPUTE)]
    assert below[:5] == ["ProfilerStep#1", "around", "F stage 0 microbatch 0", "inner", "inmost"]
    assert "across two actions" not in below and "into an action" not in below
    assert merged.left_out >= 2
    other_threads = {name for (_, thread), name in names(trace, "thread_name").items() if thread > RECEIVES}
    assert other_threads == {"host thread 7", "stream 20"}


def test_a_rank_without_a_trace_is_left_empty(folder: Path, tmp_path: Path) -> None:
    (folder / f"rank_01.{DIGITS}.pt.trace.json.gz").unlink()
    run = read_run(folder)
    assert merge_traces([run], tmp_path / "trace.json").flows == 0
    trace = read_strictly(tmp_path / "trace.json")
    assert trace["pipegraph"]["problems"] == ["rank 1 of 2 has no trace"]
    assert slices(trace, 0, COMPUTE) and not slices(trace, 1, COMPUTE)


def test_clocks_that_are_off_are_noticed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SCHEDULE, {1: ROWS}, offsets=[0.0, 0.0])
    file = folder / f"rank_01.{DIGITS}.pt.trace.json.gz"
    trace = json.loads(gzip.decompress(file.read_bytes()))
    trace["pipegraph"]["clock"]["offset_ns"] = -1_000_000_000
    file.write_bytes(gzip.compress(json.dumps(trace).encode()))
    merged = merge_traces([read_run(folder)], tmp_path / "trace.json")
    read_strictly(tmp_path / "trace.json")
    assert merged.early > 0


def test_nothing_is_left_if_the_file_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(PipegraphError, "trace.json", "File exists", advice="-o"):
        merge_traces([read_run(folder)], tmp_path / "file" / "trace.json")
    (tmp_path / "trace.json").mkdir()
    with refused(PipegraphError, "trace.json", "Is a directory", advice="-o"):
        merge_traces([read_run(folder)], tmp_path / "trace.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run", "trace.json"]
