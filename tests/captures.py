"""Models of tests/models and examples, each captured once for each process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pipegraph
from pipegraph.graph.captured import Captured
from pipegraph.graph.sources import load
from tests.equal_work import equal_work_shared

ROOT = Path(__file__).parents[1]


@cache
def captured(model: str, weights: bool = False) -> Captured:
    """What ``pipegraph.capture`` makes of a model, as the command line takes it: ``tests/models/t5.py``.

    Those who get it do not change it. Without ``weights`` the parameters are on the meta device.
    """
    name, folder = model.removeprefix("hf:"), "hf:" if model.startswith("hf:") else ""
    source = load(f"{folder}{ROOT / name}", weights=weights)
    with equal_work_shared():
        return pipegraph.capture(source.model, source.args, source.kwargs)
