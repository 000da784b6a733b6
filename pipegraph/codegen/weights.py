"""The weights of a package: a safetensors file (shard) per stage, and their index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from pipegraph.arguments import argument
from pipegraph.errors import PackageError
from pipegraph.graph.captured import Captured
from pipegraph.graph.partition.stages import StageGraph
from pipegraph.package import Package
from pipegraph.package.folder import write_tensor_index, write_tensors
from pipegraph.progress import track
from pipegraph.runtime.checkpoint.weights import check_names


def shard_plan(captured: Captured, stages: Sequence[StageGraph], weights: bool) -> dict[str, tuple[str, ...]]:
    """Assign tensors to shards.

    Every tensor is written once: in the first stage that has it, under the first of its names.

    Args:
        weights: without them, only buffers and constants are written, because nothing else could restore their values
            (a rotary table).

    Returns:
        file name of each shard → names of the tensors in it.
    """
    shards: dict[str, tuple[str, ...]] = {}
    placed: set[str] = set()
    for stage in stages:
        entries = map(captured.state.__getitem__, stage.state)
        names = [entry.canonical for entry in entries if weights or entry.kind != "parameter"]
        new = tuple(name for name in dict.fromkeys(names) if name not in placed)
        placed.update(new)
        if new:
            shards[shard_name(stage.index, len(stages))] = new
    return shards


def shard_name(stage: int, stages: int) -> str:
    """The name of the file that holds a stage's tensors."""
    return f"stage-{stage:05}-of-{stages:05}.safetensors"


def write_weights(captured: Captured, shards: dict[str, tuple[str, ...]], folder: Path) -> None:
    """Write the shards and ``model.safetensors.index.json``, from the model's own tensors.

    Raises:
        PackageError: a tensor is on the meta device, and has no value to write.
    """
    for file, names in track("writing weights of stages", shards.items()):
        _check_values(captured, names)
        write_tensors({name: captured.tensors[name].cpu().contiguous().clone() for name in names}, folder / file)
    _write_index(captured, shards, folder)


def copy_weights(
    captured: Captured, shards: dict[str, tuple[str, ...]], folder: Path, checkpoint: Path | Mapping[str, Tensor]
) -> None:
    """Write the weights of a checkpoint into a package that has none, one stage at a time.

    Each stage reads the checkpoint as it would before a run. Tensors that the checkpoint stores in the same form are
    copied from file to file and not held in memory.

    Raises:
        PackageError: the checkpoint belongs to another model, or is damaged.
    """
    package = Package.open(folder)
    check_names(package.manifest, checkpoint)
    for stage in track("copying weights of stages", package.manifest.stages):
        file = shard_name(stage.index, len(package.manifest.stages))
        if file not in shards:
            continue
        module = package.load_stage(stage.index, weights=checkpoint)
        state = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        tensors = {captured.state[name].canonical: tensor.detach() for name, tensor in state}
        written = folder / f".{file}"  # not yet in place of the shard, from which the stage may still read buffers
        write_tensors({name: tensors[name] for name in shards[file]}, written)
        del module, state, tensors
        written.replace(folder / file)
    _write_index(captured, shards, folder)


def _write_index(captured: Captured, shards: dict[str, tuple[str, ...]], folder: Path) -> None:
    files = {name: file for file, names in shards.items() for name in names}
    write_tensor_index(files, sum(captured.tensors[name].nbytes for name in files), folder)


def _check_values(captured: Captured, names: Iterable[str]) -> None:
    empty = [name for name in names if captured.tensors[name].device == torch.device("meta")]
    if empty:
        kind = "weights" if captured.state[empty[0]].kind == "parameter" else "buffers"
        suffix = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        advice = (
            f"capture the model with its weights, or give {argument('weights', False)}"
            if kind == "weights"
            else "build the model on the CPU, so that its buffers hold their values"
        )
        raise PackageError(f"{empty[0]}{suffix} on the meta device: there are no {kind} to write.", f"{advice}.")
