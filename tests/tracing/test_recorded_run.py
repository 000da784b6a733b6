"""Traces read as far as they go."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.tracing import recorded_run
from pipegraph.tracing.recorded_run import TraceError, read_trace
from tests.messages import refused

EVENTS: list[dict[str, Any]] = [{"name": 'a "}],', "ts": 1.25}, {"name": "β\u2028", "args": {"k": [1, {}]}}, {}]
TRACE = {
    "schemaVersion": 1,
    "baseTimeNanoseconds": 12345,
    "pipegraph": {"run": "a", "clock": {"offset_ns": 1}},
    "traceEvents": EVENTS,
}


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_read_compressed_or_not(packed: bool, tmp_path: Path) -> None:
    text = json.dumps(TRACE, indent=1, ensure_ascii=False).encode()
    file = tmp_path / "trace"
    file.write_bytes(gzip.compress(text) if packed else text)
    trace = read_trace(file)
    assert list(trace.events()) == EVENTS
    assert (trace.baseTimeNanoseconds, trace.pipegraph, trace.problem) == (12345, TRACE["pipegraph"], "")


@given(st.data())
def test_a_truncated_file_gives_what_it_has(data: st.DataObject) -> None:
    text = json.dumps(TRACE).encode()
    packed = data.draw(st.booleans())
    content = gzip.compress(text) if packed else text
    end = data.draw(st.integers(0, len(text) - 1)) if not packed else data.draw(st.integers(2, len(content) - 9))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace")
        file.write_bytes(content[:end])
        try:
            trace = read_trace(file)
        except TraceError:
            return  # too little of it is there
        events = list(trace.events())
        assert events == EVENTS[: len(events)]
        assert trace.problem == "it is truncated" or packed  # all of it, but for the bytes that only check it


def test_a_truncated_file_gives_the_events_before_its_end(tmp_path: Path) -> None:
    text = json.dumps(TRACE).encode()
    file = tmp_path / "trace"
    file.write_bytes(text[: text.index(b"args") + 12])
    assert list(read_trace(file).events()) == EVENTS[:1]


def test_what_is_no_event_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b'{"traceEvents": [1, {"ts": 1}, [], {"name": "\xff"}]}')
    assert list(read_trace(file).events()) == [{"ts": 1}]


@pytest.mark.parametrize("text", ["", "[1]", "hello", '{"a" 1}', '{"a": 1', '{"traceEvents": [1 2]}', "[" * 100_000])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(TraceError):
        read_trace(file)


def test_an_endless_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is small before it is unpacked."""
    file = tmp_path / "trace"
    with file.open("wb") as opened:
        opened.truncate(1_500_000_000)
    with refused(TraceError, "1500000000 bytes", "1073741824"):
        read_trace(file)
    monkeypatch.setattr(recorded_run, "LARGE_LIMIT", 2**20)
    file.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 2**20 + b"]}"))
    with refused(TraceError, "1.0 MiB"):
        read_trace(file)


def test_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace")
    with refused(TraceError, "named pipe"):
        read_trace(tmp_path / "trace")


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    data = bytearray(gzip.compress(json.dumps(TRACE).encode()))
    data[12:30] = b"\xff" * 18
    file.write_bytes(data)
    with pytest.raises(TraceError):
        read_trace(file)
