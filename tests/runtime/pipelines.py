"""Pipelines for tests of the runtime, which compile nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipegraph import Pipeline
from pipegraph.package import Package


def pipeline(package: Package | Path | str, schedule: Any = "1f1b", kernels: Any = "autograd", **opts: Any) -> Pipeline:
    """A `Pipeline` whose kernels call the stage each time, where the default ones take seconds to be made."""
    return Pipeline(package, schedule, kernels=kernels, **opts)
