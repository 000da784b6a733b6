"""Process groups, stores, the launcher, and wrappers of modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from pipegraph.loopback import ADDRESS


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
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def profiler_is_recording() -> bool:
    """Return whether a profiler of this process records. Torch's public profiler knows only of itself."""
    return bool(torch.autograd._profiler_enabled())


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
