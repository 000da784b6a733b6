"""Tensors under their names, in the files of torch.distributed.checkpoint (DCP).

DTensors are written by each rank as the part that it holds, and read as the part that it needs. What several ranks hold
is written once. DCP's planners and storages are called here one by one, as its `save` and `load` do, because those need
a process group of torch's own, whose name two ranks choose alike only if they have made and closed the same groups; and
in a plain process they warn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pipegraph.runtime.checkpoint.metadata import read_metadata
from pipegraph.runtime.checkpoint.ranks import CheckpointRanks


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of all tensors in CPU memory."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    copied: dict[str, Tensor] = BlockingAsyncStager().stage(dict(tensors))
    return copied


def write(tensors: Mapping[str, Tensor], folder: Path, ranks: CheckpointRanks) -> None:
    """Write the tensors of all ranks into a folder. Collective.

    Raises:
        CheckpointError: a rank could not write; on every rank.
    """
    from torch.distributed.checkpoint import FileSystemWriter

    from pipegraph.runtime.checkpoint.packed_planners import PackedSavePlanner

    writer, planner = FileSystemWriter(folder), PackedSavePlanner(tensors)

    def own_plan() -> Any:
        planner.set_up_planner(planner.unpacked, writer.storage_meta(), ranks.is_first)
        writer.set_up_storage_writer(ranks.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = ranks.collect(ranks.agree(own_plan))

    def all_plans() -> tuple[Any, Any]:
        if plans is None:
            return None, None
        without_duplicates, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(without_duplicates), metadata

    divided, metadata = ranks.agree(all_plans)
    plan = ranks.scatter(divided)

    def write_data() -> Any:
        written = writer.write_data(planner.finish_plan(plan), planner)
        written.wait()
        return written.value()

    written = ranks.collect(ranks.agree(write_data))
    ranks.agree(lambda: None if written is None else writer.finish(metadata, written))


class StoredTensors:
    """The tensors of a checkpoint.

    Args:
        folder: of the checkpoint.
        files: the names of the files that it lists; no other one is opened. None for a checkpoint of another tool,
            which lists none.

    Attributes:
        entries: name of each tensor → its size, dtype and chunks.

    Raises:
        CheckpointError: as `read_metadata`.
    """

    def __init__(self, folder: Path, files: Collection[str] | None) -> None:
        self._folder = folder
        self._metadata = read_metadata(folder, files)
        self.entries: dict[str, Any] = self._metadata.state_dict_metadata

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors with what is stored under their names. Each rank reads what it needs."""
        from torch.distributed.checkpoint import FileSystemReader

        from pipegraph.runtime.checkpoint.packed_planners import PackedLoadPlanner

        reader, planner = FileSystemReader(self._folder), PackedLoadPlanner(tensors)
        planner.set_up_planner(planner.unpacked, self._metadata, is_coordinator=True)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        (plan,) = reader.prepare_global_plan(plans)
        reader.read_data(planner.finish_plan(plan), planner).wait()
