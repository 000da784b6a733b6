"""Traces read piece by piece."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.tracing.reading import trace_stream
from pipegraph.tracing.reading.trace_stream import Broken, entries

TRACE = {
    "schemaVersion": 1,
    "traceEvents": [{"name": 'a "}],', "ts": 1.25}, {"name": "β\u2028", "args": {"k": [1, {}]}}, {}],
    "empty": [],
    "number": 12345,
}
EXPECTED = [
    ("schemaVersion", 1),
    *(("traceEvents", event) for event in TRACE["traceEvents"]),  # type: ignore[attr-defined]
    ("empty", []),
    ("number", 12345),
]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 18])
@pytest.mark.parametrize("packed", [False, True])
def test_entries_do_not_depend_on_where_chunks_end(
    chunk: int, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_stream, "_CHUNK", chunk)
    text = json.dumps(TRACE, indent=1, ensure_ascii=False).encode()
    file = tmp_path / "trace"
    file.write_bytes(gzip.compress(text) if packed else text)
    assert list(entries(file)) == EXPECTED


@given(st.data())
def test_a_truncated_file_gives_what_it_has(data: st.DataObject) -> None:
    text = json.dumps(TRACE).encode()
    packed = data.draw(st.booleans())
    whole = gzip.compress(text) if packed else text
    end = data.draw(st.integers(0, len(text) - 1)) if not packed else data.draw(st.integers(2, len(whole) - 9))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace")
        file.write_bytes(whole[:end])
        found: list[tuple[str, Any]] = []
        try:
            for entry in entries(file):
                found.append(entry)
        except Broken:
            assert found == EXPECTED[: len(found)]
        else:
            assert packed and found == EXPECTED  # all of it, but for the bytes that only check it


@pytest.mark.parametrize("text", ["", "[1]", "hello", '{"a" 1}', '{"a": 1', '{"traceEvents": [1 2]}', "[" * 100_000])
def test_what_is_no_trace_is_broken(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(Broken):
        list(entries(file))


def test_damaged_gzip_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    data = bytearray(gzip.compress(json.dumps(TRACE).encode()))
    data[12:30] = b"\xff" * 18
    file.write_bytes(data)
    with pytest.raises(Broken):
        list(entries(file))
