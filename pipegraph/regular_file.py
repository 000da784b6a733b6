"""Files that are read or replaced as a whole.

Those that are read are regular and of limited size, so that no pipe, device or endless file keeps a reader waiting.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LIMIT: Final = 16 * 2**20
"""Bytes of the largest file that people write, such as a manifest or a plan."""
LARGE_LIMIT: Final = 2**30
"""Bytes of the largest file that programs write, such as a trace or the grid of a schedule."""

_TYPES: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular_file(file: Path, limit: int = LIMIT) -> bytes:
    """Read a regular file of at most ``limit`` bytes. Raises OSError or ValueError, and never waits."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"it is {_TYPES.get(stat.S_IFMT(status.st_mode), 'something')}, not a regular file")
    size = status.st_size
    if size <= limit:
        with file.open("rb") as opened:
            data = opened.read(limit + 1)
        if len(data) <= limit:
            return data
        size = len(data)
    raise ValueError(f"it has {size} bytes, and at most {limit} are read")


@contextmanager
def replaced_file(file: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces the file when the body has written it. After an error nothing is left."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
