"""DTensors, and how `fully_shard` divides parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def sharding_policy(module: Any) -> Any:
    """The MixedPrecisionPolicy with which a user has applied `fully_shard` to a module, which has no public way to it.

    Everything else of that follows from the parameters and their public layouts.
    """
    return module._get_fsdp_state()._mp_policy


class ShardingRanks(NamedTuple):
    """The global ranks between which `fully_shard` divides parameters, and those over which it reduces gradients."""

    dividing: set[int]
    reducing: set[int]


def sharding_ranks(module: Any) -> ShardingRanks:
    """Over which ranks a user has applied `fully_shard` to a module. Its mesh has no public way to it.

    The layout of a parameter does not say which of its dimensions are of `fully_shard`, and which were there before.
    """
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    meshes = [group.mesh_info for group in groups if group is not None]
    shards = [mesh_info.shard_process_group for mesh_info in meshes if mesh_info.shard_mesh_dim is not None]
    return ShardingRanks(
        {rank for group in shards for rank in dist.get_process_group_ranks(group)},
        {rank for mesh_info in meshes for rank in mesh_info.mesh.mesh.flatten().tolist()},
    )


def packed_shard(dim: int, parts: int) -> Any:
    """Return a placement that cuts a dimension into `parts` consecutive parts, and divides each between all ranks.

    Public placements divide a dimension as a whole. torch uses this one for FSDP over tensor parallelism, and
    transformers for packed projections.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


class PackedPlace(NamedTuple):
    """Which dimension of a DTensor is packed, of how many parts, and which dimension of the mesh divides them."""

    dim: int
    parts: int
    mesh_dim: int


def packed_place(tensor: Any) -> PackedPlace | None:
    """Where `packed_shard` divides a DTensor; None if it does nowhere.

    Torch writes FSDP over a dimension that tensor parallelism divides as it writes a packed one; but there a later
    dimension of the mesh divides the same dimension.
    """
    placements = getattr(tensor, "placements", ())
    for index, placement in enumerate(placements):
        is_packed = type(placement) is type(packed_shard(0, 1))
        if is_packed and not any(successor.is_shard(placement.dim) for successor in placements[index + 1 :]):
            return PackedPlace(placement.dim, placement.split_factor, index)
    return None


def differentiable_part(tensor: Any) -> Tensor:
    """What this rank has of a DTensor, differentiably.

    Torch 2.11 cannot add up gradients of a packed tensor that have other strides than it: they get its strides here.
    """
    local_tensor: Tensor = tensor.to_local()
    if torch.__version__ < "2.13" and local_tensor.requires_grad and packed_place(tensor) is not None:
        local_tensor.register_hook(Tensor.contiguous)
    return local_tensor


def local_tensor(tensor: Any) -> Tensor:
    """Return what this rank holds of a DTensor. `to_local` is for autograd, and makes a view at each call."""
    return waited(tensor._local_tensor)


def waited(tensor: Tensor) -> Tensor:
    """Wait for the result of a functional collective. No public name distinguishes such a tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
