"""Every private or undocumented interface of torch that the runtime uses: one function each, with the reason.

Checked with torch 2.11, 2.13 and 2.15. What a new torch breaks here raises an AttributeError or a TypeError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree

from pipegraph import loopback


def default_store() -> dist.Store:
    """The store of the default process group.

    Public torch has no way to it. A store of the runtime's own would need an address that every rank knows.
    """
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def uses_nccl(device: torch.device) -> bool:
    """Whether ranks with this device talk by NCCL. They do unless the default group was made for gloo alone, as for
    ranks that share a GPU, which NCCL refuses."""
    return device.type == "cuda" and "nccl" in dist.get_backend_config()


def make_backend(store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> Any:
    """A backend over `store` for tensors on this device, whose operations fail after `timeout` seconds.

    The classes ProcessGroupGloo and ProcessGroupNCCL are exported but not documented, and their timeout is private.
    `new_group` does not serve: every process of the world has to call it, also those of other pipelines, and the group
    stays in torch's global tables until all of them destroy it.
    """
    if uses_nccl(device):
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = _gloo_devices()
    return gloo(store, rank, size, options)


def make_group(lines: Sequence[Sequence[int]], kind: str, timeout: float) -> dist.ProcessGroup:
    """A process group of torch's own, for what takes no other: DTensors, and collectives that profilers see.

    All ranks of all lines call this together. If they are not the whole world, the members of a line alone make its
    group; torch then names it by how many groups a process has now, so that the groups of two pipelines that are made
    one after the other in the same processes may meet.

    Args:
        lines: the ranks of each group that is made, in the same order on every rank; this process is in one of them.
    """
    limit, backend = timedelta(seconds=timeout), "nccl" if uses_nccl(torch.device(kind)) else "gloo"
    group_ranks = next(line for line in lines if dist.get_rank() in line)
    if sum(map(len, lines)) < dist.get_world_size():
        group = dist.new_group(list(group_ranks), timeout=limit, backend=backend, use_local_synchronization=True)
    else:
        groups = [dist.new_group(list(line), timeout=limit, backend=backend) for line in lines]
        group = groups[lines.index(group_ranks)]
    assert isinstance(group, dist.ProcessGroup), "this process is one of its ranks"
    return group


def groups_made() -> int:
    """How many groups this process has made, by which torch names the next one. Public torch does not say."""
    from torch.distributed.distributed_c10d import _world

    return int(_world.group_count)


def name_groups_from(count: int) -> None:
    """Let torch name the next group by this number. Ranks that made other groups by themselves would give it others."""
    from torch.distributed.distributed_c10d import _world

    _world.group_count = count


def release_groups(groups: list[dist.ProcessGroup]) -> None:
    """Close the connections of groups that `make_group` made. Empties the list.

    Destroying a group closes its connections if nothing else holds it. Aborting is for NCCL alone: gloo has none. A
    user who has destroyed all groups has destroyed these as well, which `get_backend` says.
    """
    while groups:
        group = groups.pop()
        with suppress(ValueError):
            if dist.get_backend(group) == "nccl":
                group._get_backend(torch.device("cuda")).abort()
            dist.destroy_process_group(group)


def make_mesh(shape: torch.Tensor, names: Sequence[str], kind: str, timeout: float) -> DeviceMesh:
    """Return a mesh with separate process groups, which `release_mesh` can close without closing the user's.

    Every rank of the mesh makes it.

    Args:
        shape: the global ranks, laid out as the mesh.
    """
    groups = []
    for dim in range(shape.dim()):
        lines = shape.movedim(dim, -1).reshape(-1, shape.shape[dim])
        groups.append(make_group(lines.tolist(), kind, timeout))
    return DeviceMesh.from_group(groups, kind, mesh=shape, mesh_dim_names=tuple(names))


def release_mesh(mesh: DeviceMesh) -> None:
    """Close the connections of a mesh that `make_mesh` made, which wakes every rank that waits in one of its groups.

    The mesh keeps its groups in a private table, and so their connections open. DTensor's caches keep meshes as well,
    and give them to DTensors of the next mesh over the same ranks, which counts as equal; torch's functions that empty
    them are private, too.
    """
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()
    groups = mesh.get_all_groups()
    if hasattr(mesh, "_pg_registry"):  # not in every torch
        mesh._pg_registry.clear()
    release_groups(groups)


@cache
def _gloo_devices() -> list[Any]:
    """The process's gloo devices, chosen as torch chooses them.

    All groups share them, because each device has a thread that wakes a hundred times a second.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
    return [dist.ProcessGroupGloo.create_default_device()]


def launcher_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """The environment by which a process of this machine finds the others, as torchrun sets it.

    All but `TORCHELASTIC_USE_AGENT_STORE` is documented. That one says that the launcher holds the store at `port`
    and no rank does, so that the system can choose the port and the store outlives every rank.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": loopback.ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def storage_info(path: str, offset: int, length: int, transforms: Sequence[str] | None) -> Any:
    """Where a part of a tensor is in the files of torch.distributed.checkpoint, as its `FileSystemReader` takes it.

    The class is private, and its module builds it nowhere but in what it unpickles.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length, transforms)


def profiler_is_recording() -> bool:
    """Return whether a profiler of this process records. Torch's public profiler knows only of itself."""
    return bool(torch.autograd._profiler_enabled())


def infinities_found(scaler: GradScaler, optimizer: Optimizer) -> list[torch.Tensor]:
    """For each device 1.0 if `unscale_` found an infinity in an optimizer's gradients, else 0.0.

    `step` and `update` read these tensors. Only subclasses in torch reduce them over ranks, and over one group alone.
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def unscaling_of_parts(scaler: GradScaler, part_of: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """A method for a scaler, under its name, by which `unscale_` takes the parts of DTensors that `part_of` gives.

    It takes all gradients of an optimizer in one operation, for which torch mixes DTensors neither with other tensors
    nor with those of another mesh. Torch's own subclasses override the same method.
    """
    unscale_gradients = type(scaler)._unscale_grads_

    def part(parameter: torch.Tensor) -> torch.Tensor:
        if parameter.grad is None or not hasattr(parameter, "placements"):
            return parameter
        local_gradient = part_of(parameter.grad)
        stand_in = local_gradient.detach()
        stand_in.grad = local_gradient
        return stand_in

    def unscale(optimizer: Any, *args: Any) -> Any:
        groups = [{"params": list(map(part, group["params"]))} for group in optimizer.param_groups]
        return unscale_gradients(scaler, SimpleNamespace(param_groups=groups), *args)  # type: ignore[arg-type]

    return {"_unscale_grads_": unscale}


def is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Return whether `unscale_` has been called for the gradients that an optimizer has now."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED")


def checkpointed(module: nn.Module) -> nn.Module | None:
    """Return the module in torch's `checkpoint_wrapper`, or None if `module` is not such a wrapper.

    torch has no public function for it. The wrapper removes its prefix only from the names in its `named_parameters`,
    not from the names that an outer module lists.
    """
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if wrappers is None or not isinstance(module, wrappers.ActivationWrapper):
        return None
    inner: nn.Module = module._checkpoint_wrapped_module
    return inner


def is_replicated(module: nn.Module) -> bool:
    """Return whether torch's composable `replicate` has put DistributedDataParallel's hooks on a module.

    Its state is kept in a registry without a public reader. The newer `replicate`, of FSDP's kind, has another state.
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    replicate = sys.modules.get("torch.distributed._composable.replicate")
    if contract is None or replicate is None or "replicate" not in (contract._get_registry(module) or {}):
        return False
    return isinstance(replicate.replicate.state(module), getattr(replicate, "_ReplicateState", ()))


def has_communication_hook(wrapper: DistributedDataParallel) -> bool:
    """Return whether a hook stands in for DistributedDataParallel's own reduction. Only the wrapper knows its hooks."""
    return bool(wrapper._comm_hooks)


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


@contextmanager
def reporting_operations(report: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call `report` with each operation that torch runs and with what it is given. The mode has no public name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reported(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            report(func, (args, kwargs))
            return func(*args, **(kwargs or {}))

    with Reported():
        yield


def differentiable_part(tensor: Any) -> Tensor:
    """What this rank has of a DTensor, differentiably.

    Torch 2.11 cannot add up gradients of a packed tensor that have other strides than it: they get its strides here.
    """
    local_tensor: Tensor = tensor.to_local()
    if torch.__version__ < "2.13" and local_tensor.requires_grad and packed_place(tensor) is not None:
        local_tensor.register_hook(Tensor.contiguous)
    return local_tensor


pytree = _pytree
"""Torch's nested containers. It has no public module for them, and other libraries do not know the classes that a model
registered with torch."""


def version(tensor: torch.Tensor) -> int:
    """A number that every write to the tensor changes."""
    return tensor._version


def take_hooks(parameter: Tensor, module: str) -> list[tuple[str, Callable[..., Any]]]:
    """Remove the hooks of a parameter whose functions a Python module defines. Only who registers a hook can remove it.

    Returns the methods that register them, and the hooks, in the order in which autograd calls them.
    """
    kinds: dict[str, dict[int, Any] | None] = {
        "register_hook": parameter._backward_hooks,
        "register_post_accumulate_grad_hook": parameter._post_accumulate_grad_hooks,
    }
    registrations = []
    for method, hooks in kinds.items():
        keys = [key for key, hook in (hooks or {}).items() if getattr(hook, "__module__", "") == module]
        registrations += [(method, hooks.pop(key)) for key in keys if hooks is not None]
    return registrations
