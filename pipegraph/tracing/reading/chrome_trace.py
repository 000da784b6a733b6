"""Reading a Chrome trace, compressed or not; a truncated one as far as it goes."""

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
_TRIES = 32  # objects from the end after which a truncated trace may be closed


class TraceError(PipegraphError):
    """A file is no Chrome trace: the message says why."""


class ChromeTrace(msgspec.Struct):
    """A trace in JSON's object format. Its events are decoded one by one, because a trace may be large.

    ``problem`` says why it is not complete; empty if it is.
    """

    traceEvents: list[msgspec.Raw] = []
    baseTimeNanoseconds: Any = None
    pipegraph: Any = None
    problem: str = ""

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events, without damaged ones."""
        decoder = msgspec.json.Decoder(dict[str, Any])
        for text in self.traceEvents:
            with suppress(*_DAMAGE):
                yield decoder.decode(text)


def read_trace(file: Path) -> ChromeTrace:
    """Read a file. Raises TraceError if it is no trace, and OSError if it cannot be read."""
    data = file.read_bytes()
    if data.startswith(_GZIP):
        try:
            data = zlib.decompressobj(wbits=31).decompress(data)  # as much as there is
        except zlib.error:
            raise TraceError("it is no gzip file, or damaged") from None
    try:
        return msgspec.json.decode(data, type=ChromeTrace)
    except _DAMAGE as error:
        if "truncated" not in str(error):
            raise TraceError(f"it is no Chrome trace: {error}") from None
    return _read_truncated(data)


def _read_truncated(data: bytes) -> ChromeTrace:
    """Read a truncated trace up to the last object after which closing brackets make it valid."""
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
