"""Planners of torch.distributed.checkpoint (DCP) for packed parameters, such as gate and up in one tensor.

A rank has a part of the gate, followed by a part of the up; in the whole tensor these parts are not adjacent. DCP
treats a rank's part of a DTensor as one piece. Here each part is a separate piece: a checkpoint then fits every mesh.

whole     gate 0 | gate 1 | up 0 | up 1
rank 0    gate 0 | up 0   ─▶ two pieces, each with its place in the whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Replicate

from pipegraph.torch_private.dtensor import PackedPlace, packed_place

Pieces = dict[torch.Size, Tensor]
"""Where each piece of a tensor begins in the whole → what this rank holds of it: the same memory."""


@dataclass(frozen=True)
class _Packed:
    shape: torch.Size
    pieces: Pieces


class _PackedTensors:
    """What a planner of DCP does not know of some tensors.

    Attributes:
        packed: by name, the packed ones among them.
        unpacked: the rest, which are DCP's.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        places = {name: place for name, tensor in tensors.items() if (place := packed_place(tensor)) is not None}
        self.packed = {name: _Packed(tensors[name].shape, _pieces(tensors[name], at)) for name, at in places.items()}
        self.unpacked = {name: tensor for name, tensor in tensors.items() if name not in places}

    def piece(self, index: MetadataIndex) -> Tensor:
        """What this rank holds of a packed tensor, at the place that an index of a plan names."""
        assert index.offset is not None
        return self.packed[index.fqn].pieces[index.offset]


class PackedSavePlanner(_PackedTensors, DefaultSavePlanner):
    """Writes each piece of a packed parameter by itself."""

    def create_local_plan(self) -> SavePlan:
        """DCP's plan for other tensors, with the pieces."""
        plan = super().create_local_plan()
        items = [
            WriteItem(
                index=MetadataIndex(name, start),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(start, piece.shape),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=packed.shape,
                ),
            )
            for name, packed in self.packed.items()
            for start, piece in packed.pieces.items()
        ]
        self.plan = replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is written under an index of the plan."""
        return self.piece(index) if index.fqn in self.packed else super().lookup_object(index)


class PackedLoadPlanner(_PackedTensors, DefaultLoadPlanner):
    """Reads each piece of a packed parameter by itself, from whatever pieces it was written in."""

    def create_local_plan(self) -> LoadPlan:
        """DCP's plan for other tensors, with the pieces."""
        plan = super().create_local_plan()
        stored: Any = self.metadata.state_dict_metadata if self.metadata is not None else {}
        for name, packed in self.packed.items():
            chunks = [ChunkStorageMetadata(start, piece.shape) for start, piece in packed.pieces.items()]
            plan.items += create_read_items_for_chunk_list(name, stored[name], chunks)
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return what is filled by an item of the plan."""
        tensor: Tensor = self.piece(index) if index.fqn in self.packed else super().lookup_tensor(index)
        return tensor


def _pieces(tensor: Any, place: PackedPlace) -> Pieces:
    """The pieces that this rank holds; the lengths of the parts are multiples of the number of ranks."""
    local_tensor, dim, length = tensor.to_local().detach(), place.dim, tensor.shape[place.dim]
    placements = [
        Replicate() if mesh_dim == place.mesh_dim else placement for mesh_dim, placement in enumerate(tensor.placements)
    ]
    shape = [length if tensor_dim == dim else size for tensor_dim, size in enumerate(local_tensor.shape)]
    # Laid out alike but for the packed dimension: torch knows where this rank's part of such a tensor begins.
    frame: Any = DTensor.from_local(
        torch.empty(shape, device="meta"),
        tensor.device_mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    (chunk,) = frame.__create_chunk_list__()
    rank = tensor.device_mesh.get_local_rank(place.mesh_dim)
    pieces = local_tensor.chunk(place.parts, dim)
    starts = [number * (length // place.parts) + rank * piece.shape[dim] for number, piece in enumerate(pieces)]
    leading, trailing = chunk.offsets[:dim], chunk.offsets[dim + 1 :]
    return {torch.Size((*leading, start, *trailing)): piece for start, piece in zip(starts, pieces, strict=True)}
