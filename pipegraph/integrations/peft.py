"""Adapters of PEFT that were trained in a pipeline, as ``PeftModel.from_pretrained`` reads them.

model = get_peft_model(base, LoraConfig(...))
captured = pipegraph.capture(model, kwargs=batch)                        # and a package of it
pipe = pipegraph.Pipeline("build/lora", weights="checkpoints/base", ...)  # each rank reads its part of the base model
...
save_adapter(pipe, "adapter", model.peft_config["default"])               # PeftModel.from_pretrained(base, "adapter")
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Final

import torch
from peft import PeftConfig
from torch import Tensor

from pipegraph.arguments import require_path
from pipegraph.errors import PackageError
from pipegraph.integrations.first_rank import write_on_first_rank
from pipegraph.package.folder import write_tensors
from pipegraph.runtime.checkpoint.loading import find_newest
from pipegraph.runtime.checkpoint.ranks import CheckpointRanks
from pipegraph.runtime.checkpoint.saving import PREFIX
from pipegraph.runtime.checkpoint.storage import StoredTensors
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.world import LoneProcess, guard_of

WEIGHTS: Final = "adapter_model.safetensors"
_STAGING: Final = ".adapter"
_COPY: Final = ".modules_to_save."
"""Before the name of the adapter, in the name of a module that is trained as a whole."""


def save_adapter(pipe: Pipeline, folder: str | PathLike[str], config: PeftConfig, adapter: str = "default") -> None:
    """Write the adapter of a pipeline as ``adapter_model.safetensors`` and ``adapter_config.json``. Collective.

    A merged model is what PEFT makes of the files: ``PeftModel.from_pretrained(base, folder).merge_and_unload()``.

    Args:
        pipe: of a model that ``get_peft_model`` made.
        folder: is made if it does not exist, where all ranks see it. Files of an adapter there are replaced when the
            new ones are whole; others stay.
        config: of the adapter, as ``get_peft_model`` was given it.
        adapter: its name in the model.

    Raises:
        PackageError: the pipeline's model has no adapter of this name.
        CheckpointError: the files cannot be written; on every rank.
    """
    folder = require_path(folder, "folder is a folder", 'folder="adapter"')
    manifest = pipe.package.manifest
    copies = (name for stage in manifest.stages for name in stage.parameters if f"{_COPY}{adapter}." in name)
    names = [name for name in (*(manifest.checkpoint.adapters or ()), *copies) if f".{adapter}." in f"{name}."]
    if not names:
        raise PackageError(
            f"the model of the pipeline has no adapter {adapter!r}.",
            "pipegraph.capture of a model that get_peft_model made, and the name of its adapter.",
        )
    saved = pipe.save(folder / _STAGING, step=0, frozen=False)
    write_on_first_rank(pipe, folder, folder / _STAGING, lambda: _write(saved, names, adapter, folder, config))


def _write(saved: Path, names: list[str], adapter: str, folder: Path, config: PeftConfig) -> None:
    """Write the files of an adapter from a checkpoint."""
    _, index = find_newest(saved, CheckpointRanks(LoneProcess(), guard_of(None)))
    storage = StoredTensors(saved, index.files)
    entries = {name: storage.entries[f"{PREFIX}{name}"] for name in names}
    tensors: dict[str, Tensor] = {
        f"{PREFIX}{name}": torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()
    }
    storage.read(tensors)
    stored = {_stored_name(name.removeprefix(PREFIX), adapter): tensor for name, tensor in tensors.items()}
    new = folder / f".{WEIGHTS}"
    write_tensors(stored, new, {"format": "pt"})
    new.replace(folder / WEIGHTS)
    config.save_pretrained(str(folder))


def _stored_name(name: str, adapter: str) -> str:
    """``q_proj.lora_A.weight`` for ``q_proj.lora_A.default.weight``, and ``head.weight`` for a module that is trained
    as a whole, as PEFT stores them."""
    return f"{name}.".replace(f"{_COPY}{adapter}.", ".").replace(f".{adapter}.", ".").removesuffix(".")
