"""pipegraph turns an exportable PyTorch model into a pipeline of readable stages and runs it.

The names below are loaded on first use, so that ``import pipegraph`` stays quick and does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pipegraph.errors import (
    ArgumentError,
    BatchError,
    CaptureError,
    CheckpointError,
    ClosedOutput,
    OutputError,
    PackageError,
    PipegraphError,
    PlanError,
    RuntimeFault,
    ScheduleError,
    SourceError,
)
from pipegraph.version import __version__

if TYPE_CHECKING:
    from pipegraph import schedule as schedule
    from pipegraph.codegen.package_writer import write_package
    from pipegraph.graph.capture import capture
    from pipegraph.graph.partition.split_points import SplitPoint
    from pipegraph.planner.plan import plan
    from pipegraph.runtime.checkpoint.weights import Weights
    from pipegraph.runtime.pipeline import Pipeline
    from pipegraph.runtime.standalone_stages import StandaloneStages
    from pipegraph.workflows.profile import profile

__all__ = [
    "ArgumentError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "ClosedOutput",
    "OutputError",
    "PackageError",
    "PipegraphError",
    "Pipeline",
    "PlanError",
    "RuntimeFault",
    "ScheduleError",
    "SourceError",
    "SplitPoint",
    "StandaloneStages",
    "Weights",
    "__version__",
    "capture",
    "plan",
    "profile",
    "schedule",
    "write_package",
]

# Where each name that is loaded on first use is defined; `schedule` is a package of ours, found by its own name.
_DEFINED_IN = {
    "Pipeline": "pipegraph.runtime.pipeline",
    "SplitPoint": "pipegraph.graph.partition.split_points",
    "StandaloneStages": "pipegraph.runtime.standalone_stages",
    "Weights": "pipegraph.runtime.checkpoint.weights",
    "capture": "pipegraph.graph.capture",
    "plan": "pipegraph.planner.plan",
    "profile": "pipegraph.workflows.profile",
    "write_package": "pipegraph.codegen.package_writer",
}


def __getattr__(name: str) -> object:
    if name == "schedule":
        return importlib.import_module("pipegraph.schedule")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_DEFINED_IN[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
