"""A package: the folder that `pipegraph split` writes, and its manifest `pipeline.json`.

Package                    the folder: open, edited, missing, load_stage
 └── Manifest              the JSON, key for key
      ├── values: Value    what crosses a boundary, for one microbatch
      └── stages: StageEntry
"""

from pipegraph.package.folder import MANIFEST, WEIGHTS_INDEX, Package, checkpoint_folder
from pipegraph.package.manifest import (
    CALLER,
    NOT_CONSTANT,
    SCHEMA_VERSION,
    Buffer,
    Manifest,
    StageEntry,
    Value,
    leaves,
)

__all__ = [
    "CALLER",
    "MANIFEST",
    "NOT_CONSTANT",
    "SCHEMA_VERSION",
    "WEIGHTS_INDEX",
    "Buffer",
    "Manifest",
    "Package",
    "StageEntry",
    "Value",
    "checkpoint_folder",
    "leaves",
]
