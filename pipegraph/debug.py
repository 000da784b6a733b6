"""Switches for developers of pipegraph and for bug reports, to write or check each form of a graph.

``PIPEGRAPH_DUMP=DIR`` writes every form that a model goes through, as numbered text files; ``diff -r`` compares two
folders. Under torchrun each rank has its own folder, ``DIR/rank_00``.

    dump("export", str(program))                      DIR/00_export.txt
    dump("drop_dead_code", lambda: graph_text(graph))   DIR/01_drop_dead_code.txt

``PIPEGRAPH_VERIFY=1`` checks every form, so that an error is reported in the step that causes it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

_VARIABLE = "PIPEGRAPH_DUMP"
_numbers: dict[Path, count[int]] = {}
_lock = threading.Lock()


def dumping() -> bool:
    """Return whether forms are written at all."""
    return bool(os.environ.get(_VARIABLE))


def dump(name: str, text: str | Callable[[], str]) -> None:
    """Write one form to the next numbered file; does nothing unless ``PIPEGRAPH_DUMP`` is set.

    Args:
        name: of the form; becomes the name of the file.
        text: its text, or a function that makes it, which is called only if the text is written.
    """
    if not dumping():
        return
    folder = Path(os.environ[_VARIABLE])
    if "RANK" in os.environ:
        folder /= f"rank_{int(os.environ['RANK']):02d}"
    with _lock:
        number = next(_numbers.setdefault(folder, count()))
    file = folder / f"{number:02d}_{re.sub(r'[^0-9A-Za-z_.-]+', '_', name)}.txt"
    content = text if isinstance(text, str) else text()
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(content.rstrip("\n") + "\n", encoding="utf-8")


class InvalidGraphError(AssertionError):
    """A graph breaks a rule: a bug in pipegraph, never in the model."""


def verifying() -> bool:
    """Return whether ``PIPEGRAPH_VERIFY`` asks for checks."""
    return os.environ.get("PIPEGRAPH_VERIFY", "0") not in ("", "0")
