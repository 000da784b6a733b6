"""A package: the folder that `pipegraph split` writes, and its manifest `pipeline.json`.

Package                    the folder: open, edited, missing, damaged, check_weights, load_stage
 └── Manifest              the JSON, key for key
      ├── values: Value    what crosses a boundary, for one microbatch
      ├── stages: StageEntry, each with a StageCost
      └── plan: PlanEntry  the split points, with the Prediction of a step
"""

from pipegraph.package.folder import CONFIG, MANIFEST, WEIGHTS_INDEX, Package, checkpoint_folder
from pipegraph.package.manifest import (
    CALLER,
    SCHEMA_VERSION,
    BatchEntry,
    Buffer,
    CheckpointNames,
    ListedFile,
    Manifest,
    ModelEntry,
    PlanEntry,
    Role,
    RowOperator,
    StageCost,
    StageEntry,
    Value,
    leaves,
    sequences,
)

__all__ = [
    "CALLER",
    "CONFIG",
    "MANIFEST",
    "SCHEMA_VERSION",
    "WEIGHTS_INDEX",
    "BatchEntry",
    "Buffer",
    "CheckpointNames",
    "ListedFile",
    "Manifest",
    "ModelEntry",
    "Package",
    "PlanEntry",
    "Role",
    "RowOperator",
    "StageCost",
    "StageEntry",
    "Value",
    "checkpoint_folder",
    "leaves",
    "sequences",
]
