"""The files that a package or a checkpoint lists, with their sizes and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from pipegraph.package.json_file import Count, Entry
from pipegraph.progress import track
from pipegraph.units import format_bytes

_THREADS: Final = 8
"""Threads that read files: hashlib releases the interpreter."""

Digest = Annotated[str, Meta(pattern="^sha256 [0-9a-f]{64}$")]


class ListedFile(Entry, frozen=True):
    """A file as it was written.

    Attributes:
        bytes: its size; None in a package of an older version of pipegraph.
        digest: of its content.
    """

    bytes: Count | None
    digest: Digest

    @classmethod
    def of_text(cls, text: str) -> ListedFile:
        """The entry of a file with this text, in UTF-8."""
        content = text.encode()
        return cls(len(content), f"sha256 {hashlib.sha256(content).hexdigest()}")

    @classmethod
    def read(cls, path: Path) -> ListedFile:
        """The entry of a file, which is read. Raises OSError."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}")

    def problem(self, path: Path) -> str:
        """What differs between the file and this entry; empty if nothing does. The file is there."""
        size = path.stat().st_size
        if self.bytes is not None and size != self.bytes:
            return f"it has {format_bytes(size)}, and was written with {format_bytes(self.bytes)}"
        return "" if ListedFile.read(path).digest == self.digest else "its content is not what was written"


def problems_of(folder: Path, files: Mapping[str, ListedFile]) -> dict[str, str]:
    """Name of each file that is there and differs from its entry → what differs. All of them are read."""
    names = sorted(name for name in files if (folder / name).is_file())
    with ThreadPoolExecutor(_THREADS) as threads:
        pending = [threads.submit(files[name].problem, folder / name) for name in names]
        results = zip(names, track("checking weights", pending), strict=True)
        return {name: result.result() for name, result in results if result.result()}
