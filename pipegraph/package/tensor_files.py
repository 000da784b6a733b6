"""Write tensors as safetensors files and their index, as packages and Hugging Face checkpoints have them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipegraph.package.folder import WEIGHTS_INDEX

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError, as for any other file, if the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1])), str(file)) from error


def write_tensor_index(
    files: Mapping[str, str], total_bytes: int, folder: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write ``model.safetensors.index.json``.

    Args:
        files: name of each tensor → the file that holds it.
        total_bytes: the size of all tensors.
        metadata: more entries to store next to the total size.
    """
    index = {"metadata": {"total_size": total_bytes, **(metadata or {})}, "weight_map": dict(files)}
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
