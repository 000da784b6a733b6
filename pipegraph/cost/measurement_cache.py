"""Measurements kept in the user's cache folder: one small JSON file per key."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def default_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/pipegraph``, or ``~/.cache/pipegraph`` if that variable is not an absolute path."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "pipegraph"


class Cache:
    """Entries by key. A key is a mapping of plain values.

    A cache never fails: an entry that cannot be read counts as missing, one that cannot be written is lost.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (default_folder() if folder is None else folder) / "measured"

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the entry of ``key``; None if it is missing or its file is damaged."""
        try:
            record = json.loads(self._file(key).read_text())
        except (OSError, ValueError):
            return None
        sound = isinstance(record, dict) and record.get("key") == dict(key) and isinstance(record.get("entry"), dict)
        return record["entry"] if sound else None

    def store(self, key: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
        """Keep an entry. Another process sees the old file or the new one, never a part."""
        text = json.dumps({"key": dict(key), "entry": dict(entry)}, indent=1, sort_keys=True)
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.replace(name, self._file(key))
            except OSError:
                os.unlink(name)
                raise

    def _file(self, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"
