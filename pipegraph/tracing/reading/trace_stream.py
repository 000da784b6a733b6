"""A large Chrome trace read piece by piece, as far as it goes."""

from __future__ import annotations

import codecs
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

EVENTS: Final = "traceEvents"
_CHUNK = 1 << 18
_GZIP = b"\x1f\x8b"
_SPACE = " \t\r\n"


class Broken(Exception):
    """A file ends too early, or is no Chrome trace: the message says which. What came before it was given."""


def entries(file: Path) -> Iterator[tuple[str, Any]]:
    """The (key, value) pairs of a trace in JSON's object format, compressed or not, in their order.

    Of ``traceEvents``, each event is a pair of its own, so that no more than one is held at a time. Raises Broken
    where the file ends or goes wrong, and OSError where it cannot be read.
    """
    text = _Text(file)
    text.take("{")
    while not text.next_is("}"):
        key = text.value()
        text.take(":")
        if key == EVENTS and text.next_is("["):
            text.take("[")
            while not text.next_is("]"):
                yield EVENTS, text.value()
                if not text.next_is("]"):
                    text.take(",")
            text.take("]")
        else:
            yield str(key), text.value()
        if not text.next_is("}"):
            text.take(",")


class _Text:
    """A window of a file's text, which moves on over what has been read."""

    def __init__(self, file: Path) -> None:
        self._chunks = _decoded(file)
        self._decoder = json.JSONDecoder()
        self._held, self._at = "", 0

    def next_is(self, sign: str) -> bool:
        """Whether this sign comes next, behind white space."""
        while True:
            while self._at < len(self._held) and self._held[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._held):
                return self._held[self._at] == sign
            if not self._more():
                raise Broken("it is truncated")

    def take(self, sign: str) -> None:
        if not self.next_is(sign):
            raise Broken(
                f"it is no Chrome trace: {sign} should stand where {self._held[self._at : self._at + 20]!r} does"
            )
        self._at += 1

    def value(self) -> Any:
        """The next value. One that reaches the end of what is held may go on behind it."""
        self.next_is("")
        while True:
            try:
                found, end = self._decoder.raw_decode(self._held, self._at)
            except json.JSONDecodeError as error:
                if not self._more():
                    raise Broken("it is truncated") from None
                if len(self._held) - self._at > 256 * _CHUNK:
                    raise Broken(f"it is no JSON: {error}") from None
                continue
            except RecursionError:
                raise Broken("it is no Chrome trace: it is nested too deep") from None
            if end < len(self._held):
                self._at = end
                return found
            if not self._more():
                raise Broken("it is truncated")

    def _more(self) -> bool:
        chunk = next(self._chunks, "")
        self._held, self._at = self._held[self._at :] + chunk, 0
        return bool(chunk)


def _decoded(file: Path) -> Iterator[str]:
    """The text of a file. Of a compressed one that is truncated, all there is."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    with file.open("rb") as source:
        packed = source.read(2) == _GZIP
        source.seek(0)
        inflate = zlib.decompressobj(wbits=31) if packed else None
        while chunk := source.read(_CHUNK):
            try:
                data = inflate.decompress(chunk) if inflate else chunk
            except zlib.error:
                raise Broken("it is no gzip file, or damaged") from None
            if data and (text := decode(data)):
                yield text
