"""What this machine has, and whether what was asked for has room in it."""

from __future__ import annotations

import os

from pipegraph.errors import ArgumentError
from pipegraph.units import format_bytes


def memory_of_host() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_room(required_bytes: int, subject: str) -> None:
    """Raise ArgumentError if ``subject``, an input of ``required_bytes``, is larger than the memory of this machine."""
    present = memory_of_host()
    if required_bytes > present:
        raise ArgumentError(
            f"{subject} takes {format_bytes(required_bytes)}, and this machine has {format_bytes(present)}.",
            "fewer rows or tokens.",
        )
