"""`PIPEGRAPH_VERIFY=1`: checks of every form of a graph, so that a mistake is found where it is made."""

from __future__ import annotations

import os


class InvalidGraphError(AssertionError):
    """A graph breaks a rule: a bug in pipegraph, never in the model."""


def verifying() -> bool:
    """Return whether ``PIPEGRAPH_VERIFY`` asks for checks."""
    return os.environ.get("PIPEGRAPH_VERIFY", "0") not in ("", "0")
