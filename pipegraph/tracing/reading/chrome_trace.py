"""A Chrome trace as a file holds it, compressed or not; of a truncated one, as far as it goes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pipegraph.errors import PipegraphError

_GZIP = b"\x1f\x8b"
_DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TRIES = 32  # ends at which a truncated trace may be closed


class TraceError(PipegraphError):
    """A file is no Chrome trace: the message says why."""


class ChromeTrace(msgspec.Struct):
    """A trace in JSON's object format. Its events stay text until they are asked for: a trace may be large.

    ``problem`` says why this is not all of it.
    """

    traceEvents: list[msgspec.Raw] = []
    baseTimeNanoseconds: Any = None
    pipegraph: Any = None
    problem: str = ""

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events, without those that are damaged."""
        decoder = msgspec.json.Decoder(dict[str, Any])
        for text in self.traceEvents:
            with suppress(*_DAMAGE):
                yield decoder.decode(text)


def read_trace(file: Path) -> ChromeTrace:
    """Read a file. Raises TraceError if it is no trace, and OSError if it cannot be read."""
    data = file.read_bytes()
    if data.startswith(_GZIP):
        try:
            data = zlib.decompressobj(wbits=31).decompress(data)  # as much as there is of it
        except zlib.error:
            raise TraceError("it is no gzip file, or damaged") from None
    try:
        return msgspec.json.decode(data, type=ChromeTrace)
    except _DAMAGE as error:
        if "truncated" not in str(error):
            raise TraceError(f"it is no Chrome trace: {error}") from None
    return _closed(data)


def _closed(data: bytes) -> ChromeTrace:
    """Close a truncated trace behind the last object that makes it one."""
    end = len(data)
    for _ in range(_TRIES):
        end = data.rfind(b"}", 0, max(end, 0))
        for closing in (b"]}", b"}"):
            try:
                found = msgspec.json.decode(data[: end + 1] + closing, type=ChromeTrace)
            except _DAMAGE:
                continue
            found.problem = "it is truncated"
            return found
    raise TraceError("it is truncated")
