"""What is checked of the files of weights: their digests, and the names of their tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pipegraph.progress import track

_THREADS: Final = 8  # hashlib lets other threads run


def file_digest(path: Path) -> str:
    """The content of a file as `files` and `shards` of a manifest have it."""
    with path.open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"


def changed_files(folder: Path, digests: Mapping[str, str]) -> tuple[str, ...]:
    """The files of a folder, as named, that are there and have another digest."""
    there = sorted(name for name in digests if (folder / name).is_file())
    with ThreadPoolExecutor(_THREADS) as threads:
        found = [threads.submit(file_digest, folder / name) for name in there]
        done = zip(there, track("checking weights", found), strict=True)
        return tuple(name for name, digest in done if digest.result() != digests[name])


def first_unlisted(file: Path, listed: Container[str]) -> str | None:
    """The first tensor of a safetensors file that is not among those listed; None also if the file cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return next((name for name in opened.keys() if name not in listed), None)  # noqa: SIM118
    except (SafetensorError, OSError):
        return None  # whoever reads the tensors says what is wrong
