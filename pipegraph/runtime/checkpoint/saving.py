"""Write a checkpoint: collect what is saved on every rank, and write it into a folder that takes its place whole."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from msgspec import structs
from torch import Tensor, nn

from pipegraph.arguments import for_asker
from pipegraph.errors import CheckpointError, nearest
from pipegraph.package import ListedFile, Manifest
from pipegraph.runtime import parameters
from pipegraph.runtime.checkpoint import extra_state, folder, optimizer_state, storage
from pipegraph.runtime.checkpoint.extra_state import encoded, fingerprint
from pipegraph.runtime.checkpoint.folder import CheckpointIndex
from pipegraph.runtime.checkpoint.optimizer_state import OptimizerShare, OptimizerState
from pipegraph.runtime.checkpoint.random_state import random_states
from pipegraph.runtime.checkpoint.ranks import CheckpointRanks
from pipegraph.version import __version__

# ---- model state -----------------------------------------------------------------------------------------------------
# The parameters and persistent buffers of a rank's stages as a checkpoint has them: a tied weight once.


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
        raise CheckpointError("\n  ".join([head, *problems[:_MAX_PROBLEMS], *tail]), advice)


# ---- saving ----------------------------------------------------------------------------------------------------------


OPTIMIZER: Final = "options.optimizer"
"""Where the optimizer's groups and plain values are stored."""


@dataclass(frozen=True)
class SaveRequest:
    """What `save` was asked for. It is the same on every rank but for the objects themselves."""

    folder: Path
    step: int
    keep: int | None
    background: bool
    optimizer: torch.optim.Optimizer | None
    extra: Mapping[str, Any]
    pipeline_steps: int = 0
    frozen: bool = True

    @property
    def place(self) -> Path:
        """The checkpoint's own folder."""
        return folder.place_of(self.folder, self.step)

    def text(self) -> str:
        """What has to be the same on every rank."""
        return f"step={self.step}, keep={self.keep}, background={self.background}, frozen={self.frozen}"

    def check(self) -> None:
        """Raise CheckpointError for numbers that cannot be."""
        if type(self.step) is not int or self.step < 0:
            raise CheckpointError(
                f"step cannot be {self.step!r}: it counts the steps that are done, from 0 on.", "step=100."
            )
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise CheckpointError(
                f"keep cannot be {self.keep!r}: it is how many checkpoints stay, from 1 on, or None.", "keep=3."
            )


@dataclass(frozen=True)
class Collected:
    """What a rank writes, and all but the files of the index."""

    tensors: Mapping[str, Tensor]
    index: CheckpointIndex


@dataclass(frozen=True)
class _Share:
    """What the ranks exchange before anything is written."""

    text: str
    optimizer: OptimizerShare | None
    has_parameters: bool
    extra: dict[str, tuple[bool, str]]


def collect(
    request: SaveRequest,
    manifest: Manifest,
    stages: Mapping[int, nn.Module],
    device: torch.device,
    ranks: CheckpointRanks,
) -> Collected:
    """What is saved, as it is now. Collective. Nothing is copied.

    Raises:
        CheckpointError: it cannot be saved; on every rank.
    """
    names = parameter_names(manifest, stages)

    def collect_local() -> tuple[dict[str, Tensor], dict[str, Tensor], _Share]:
        request.check()
        left_out = set[str]() if request.frozen else frozen_names(manifest, stages)
        model = {name: tensor for name, tensor in model_tensors(manifest, stages).items() if name not in left_out}
        tensors = {**model, **random_states(ranks.rank, device)}
        share = None
        if request.optimizer is not None:
            state = OptimizerState(request.optimizer, names)
            tensors |= state.tensors()
            share = state.share()
            encoded(share.plain_data(), "the optimizer's options")  # for its error, on the rank that has it
        extra = extra_state.encoded_extra(request.extra)
        marks = {
            name: (extra_state.is_stateful(request.extra[name]), fingerprint(tensor)) for name, tensor in extra.items()
        }
        return tensors, extra, _Share(request.text(), share, bool(names), marks)

    tensors, extra, share = ranks.agree(collect_local)
    shares = ranks.gather(share)

    def together() -> Collected:
        _check_equal(shares)
        saved = extra_state.versions([share.extra for share in shares])
        for name, tensor in extra.items():
            tensors[extra_state.stored_name(name, saved[name].versions[ranks.rank])] = tensor
        kind = None
        if any(share.optimizer is not None for share in shares):
            optimizer = optimizer_state.merge([share.optimizer for share in shares if share.optimizer is not None])
            kind, tensors[OPTIMIZER] = optimizer.kind, encoded(optimizer.plain_data(), "the optimizer's options")
        mesh = tuple(zip(ranks.grid.names, ranks.grid.shape, strict=True))
        return Collected(
            tensors,
            CheckpointIndex(
                generator=f"pipegraph {__version__}",
                step=request.step,
                mesh=mesh,
                optimizer=kind,
                extra=saved,
                files={},
                pipeline_steps=request.pipeline_steps,
                without_frozen=not request.frozen,
            ),
        )

    return ranks.agree(together)


def write(request: SaveRequest, collected: Collected, ranks: CheckpointRanks) -> Path:
    """Write a checkpoint and give it its place, then drop older ones. Collective. Returns its folder.

    Raises:
        CheckpointError: a rank could not write; on every rank, and nothing is left of it.
    """
    place, partial = request.place, folder.partial_of(request.folder, request.step)
    try:
        ranks.agree(lambda: folder.start(partial) if ranks.is_first else None)
        storage.write(collected.tensors, partial, ranks)
        files = _listed_files(partial, ranks)
        index = structs.replace(collected.index, files=files)
        ranks.agree(lambda: folder.finish(partial, place, index) if ranks.is_first else None)
    except BaseException as error:
        # On every rank: where connections were lost, others may still write, and the last one leaves nothing.
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, CheckpointError):
            ranks.gather(None)  # no rank continues before that is done
            raise CheckpointError(
                f"{place} was not saved: {error}",
                "a folder that all ranks can write, with room for the whole model and its optimizer.",
            ) from error
        raise
    if request.keep is not None and ranks.is_first:
        folder.drop_old(request.folder, request.step, request.keep)
    return place


def _listed_files(partial: Path, ranks: CheckpointRanks) -> dict[str, ListedFile]:
    """All files that were written; each rank reads some of them."""
    names = ranks.agree(lambda: folder.file_names(partial))
    views = ranks.gather(names)
    if any(view != views[0] for view in views):
        raise CheckpointError(
            f"the ranks do not see the same files in {partial}. ", "a folder on a file system that they share."
        )
    files = ranks.agree(lambda: {name: ListedFile.read(partial / name) for name in names[ranks.rank :: ranks.size]})
    return {name: file for part in ranks.gather(files) for name, file in sorted(part.items())}


def _check_equal(shares: list[_Share]) -> None:
    for rank, share in enumerate(shares):
        if share.text != shares[0].text:
            raise CheckpointError(f"rank {rank} saves with {share.text}, and rank 0 with {shares[0].text}.")
        if share.has_parameters and (share.optimizer is None) != (shares[0].optimizer is None):
            raise CheckpointError(
                f"rank 0 or rank {rank} was given no optimizer, and the other one was.", "the optimizer on every rank."
            )
