"""The version of torch that the tests run with."""

from __future__ import annotations

import re
from pathlib import Path

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def is_tested_version() -> bool:
    """Return whether it is the version of constraints.txt, whose figures the pages of docs/ show."""
    version = re.search(r"^torch==(\d+)\.(\d+)", _CONSTRAINTS.read_text(), re.MULTILINE)
    assert version is not None
    return tuple(map(int, version.groups())) == TORCH
