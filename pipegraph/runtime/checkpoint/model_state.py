"""The parameters and persistent buffers of a rank's stages as a checkpoint has them: a tied weight once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from pipegraph.arguments import for_asker
from pipegraph.errors import CheckpointError, nearest
from pipegraph.package import Manifest
from pipegraph.runtime import parameters

PREFIX: Final = "model."
_MAX_PROBLEMS: Final = 5


def model_tensors(manifest: Manifest, stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """The tensors themselves, by the names that they have in storage."""
    return {f"{PREFIX}{manifest.stored_name(name)}": tensor for name, tensor in parameters.state_dict(stages).items()}


def frozen_names(manifest: Manifest, stages: Mapping[int, nn.Module]) -> set[str]:
    """The names in storage of parameters that need no gradient."""
    named = (pair for stage in stages.values() for pair in parameters.parameters_of(stage, every_name=True))
    return {f"{PREFIX}{manifest.stored_name(name)}" for name, parameter in named if not parameter.requires_grad}


def parameter_names(manifest: Manifest, stages: Mapping[int, nn.Module]) -> dict[int, str]:
    """The name of each parameter in a checkpoint, by its `id`."""
    return {id(parameter): manifest.stored_name(name) for name, parameter in parameters.named_parameters(stages)}


def check_same_model(tensors: Mapping[str, Tensor], everywhere: Sequence[str], stored: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a checkpoint is of this model: its names, shapes and dtypes.

    Args:
        tensors: this rank's, by their names in storage.
        everywhere: the names of all ranks' tensors.
        stored: DCP's metadata, by names.
    """
    saved_names = {name.removeprefix(PREFIX) for name in stored if name.startswith(PREFIX)}
    model_names = {name.removeprefix(PREFIX) for name in everywhere}
    problems = [
        f"it lacks {name}.{nearest(name, saved_names - model_names)}" for name in sorted(model_names - saved_names)
    ]
    problems += [
        f"it has {name}, the model does not.{nearest(name, model_names - saved_names)}"
        for name in sorted(saved_names - model_names)
    ]
    for full, tensor in tensors.items():
        if full in stored:
            name, saved = full.removeprefix(PREFIX), stored[full]
            if tuple(saved.size) != tuple(tensor.shape):
                problems.append(
                    f"{name} has the shape {list(saved.size)} there, and {list(tensor.shape)} in the model."
                )
            elif saved.properties.dtype != tensor.dtype:
                problems.append(f"{name} is {saved.properties.dtype} there, and {tensor.dtype} in the model.")
    if problems:
        is_same = model_names == saved_names and all(
            tuple(stored[full].size) == tuple(rank_tensor.shape) for full, rank_tensor in tensors.items()
        )
        head = "the checkpoint is of this model in another dtype:" if is_same else "the checkpoint is of another model:"
        precision = for_asker('precision="bf16", which trains', "--precision bf16, which trains")
        advice = f"the precision that it was saved with; {precision} float32 parameters in 16 bits."
        if not is_same:
            advice = "the folder of this model's run, or the package that the checkpoint was saved with."
        tail = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
        raise CheckpointError("\n  ".join([head, *problems[:_MAX_PROBLEMS], *tail]) + f"\nTry: {advice}")
