"""What notebooks show of an object in place of its repr: the pictures and tables of `pipegraph.report`."""

from __future__ import annotations

import importlib
from typing import Final

from pipegraph.errors import PipegraphError

_PICTURES: Final = "pipegraph.report.notebook_pictures"
"""Found by its name: what is drawn stands on a lower floor than what draws it, and must not import it."""


def draw(function: str, subject: object) -> str | None:
    """Return what a function of that module draws of an object.

    None, so that a notebook shows the repr, if it is too large for a picture or wrong.
    """
    try:
        text: str | None = getattr(importlib.import_module(_PICTURES), function)(subject)
    except PipegraphError:
        return None
    return text
