"""Tensors under their names, in the files of torch.distributed.checkpoint (DCP).

DTensors are written by each rank as the part that it holds, and read as the part that it needs. What several ranks hold
is written once. In a plain process DCP's planners and storages are called by themselves, because `save` and `load` warn
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipegraph.errors import CheckpointError
from pipegraph.runtime.checkpoint.ranks import CheckpointRanks


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of all tensors in the memory of the host."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    copied: dict[str, Tensor] = BlockingAsyncStager().stage(dict(tensors))
    return copied


def write(tensors: Mapping[str, Tensor], folder: Path, ranks: CheckpointRanks) -> None:
    """Write tensors into a folder. Collective.

    Raises:
        CheckpointError: a rank could not write; on every rank.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save

    writer, planner, state = FileSystemWriter(folder), DefaultSavePlanner(), dict(tensors)

    def alone() -> None:
        planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        (plan,) = writer.prepare_global_plan(plans)
        written = writer.write_data(planner.finish_plan(plan), planner)
        written.wait()
        writer.finish(metadata, [written.value()])

    _do(ranks, alone, lambda group: save(state, storage_writer=writer, planner=planner, process_group=group))


def read(tensors: Mapping[str, Tensor], folder: Path, ranks: CheckpointRanks) -> None:
    """Fill tensors with what a folder has under their names. The rest is as for `write`."""
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load

    reader, planner, state = FileSystemReader(folder), DefaultLoadPlanner(), dict(tensors)

    def alone() -> None:
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        (plan,) = reader.prepare_global_plan(plans)
        reader.read_data(planner.finish_plan(plan), planner).wait()

    _do(ranks, alone, lambda group: load(state, storage_reader=reader, planner=planner, process_group=group))


def stored(folder: Path) -> dict[str, Any]:
    """What a folder has: DCP's metadata of each tensor, with its size and its dtype."""
    from torch.distributed.checkpoint import FileSystemReader

    found: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    return found


def _do(ranks: CheckpointRanks, alone: Callable[[], None], among: Callable[[dist.ProcessGroup], Any]) -> None:
    """Do it in a plain process, or among the ranks of a group, of which DCP makes the error of one that of all."""
    from torch.distributed.checkpoint import CheckpointException

    group = ranks.group()
    if group is None:
        ranks.agree(alone)
        return

    def run() -> CheckpointError | None:
        try:
            among(group)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            return CheckpointError(f"{ranks.grid.text(rank)}: {type(cause).__name__}: {cause}")
        return None

    if (problem := ranks.together(run)) is not None:
        raise problem
