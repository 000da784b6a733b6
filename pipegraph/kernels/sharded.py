"""Sharded parameters: torch's DTensor. A graph holds only its local tensor.

local tensor ─ rebuilt ─▶ DTensor, which the module computes with ─▶ gradient in the parameter's placements, local

DTensor's own dispatch leaves local operations and functional collectives in a graph. All ranks of a mesh must divide
the graph in the same way, so that their collectives meet: a division goes by operations alone, never by sizes, because
shards may differ in size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.symbolic_sizes import dimensions
from pipegraph.torch_private.dtensor import local_tensor
from pipegraph.torch_private.dtensor import waited as torch_waited
from pipegraph.torch_private.modules import hook_dicts

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

_WRAPPERS = (
    ("torch.distributed.fsdp", "FSDPModule", "fully_shard"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel"),
    ("torch.nn.parallel", "DistributedDataParallel", "DistributedDataParallel"),
)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor. Does not import torch.distributed."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor: the same memory, without autograd. Return another tensor itself."""
    return local_tensor(tensor) if is_sharded(tensor) else tensor


def differentiable_local(tensor: Any) -> Tensor:
    """Return the same, differentiably."""
    shard: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return shard


def rebuilt(tensor: Tensor, like: Any) -> Tensor:
    """Return a DTensor around a local tensor, laid out as `like`. If `like` is no DTensor, return the tensor itself.

    The DTensor's gradient is redistributed to the placements of `like`; the local tensor's is the local part of it.
    """
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def number_of_each_rank(number: Tensor, like: Any) -> Tensor:
    """Return a number of each rank that holds a part of a DTensor. If `like` is no DTensor, return the number itself.

    Collective for these ranks.
    """
    if not is_sharded(like):
        return number
    from torch.distributed.tensor import DTensor, Shard

    mesh = like.device_mesh
    ways = [Shard(dimension) for dimension in range(mesh.ndim)]
    return DTensor.from_local(number.reshape([1] * mesh.ndim), mesh, ways, run_check=False).full_tensor()


def layout(tensor: Any) -> Any:
    """Return how a DTensor is laid out over which ranks, hashable. Return None for another tensor."""
    if not is_sharded(tensor):
        return None
    return tensor.device_mesh, tuple(tensor.placements), dimensions(tensor.shape), dimensions(tensor.stride())


def layout_text(tensor: Any) -> str:
    """Return the layout as text for messages, or to compare with another rank, which has its own mesh."""
    if not is_sharded(tensor):
        return "whole on every rank"
    return f"{', '.join(map(str, tensor.placements))} over {' × '.join(map(str, tensor.device_mesh.shape))} ranks"


def is_layout(value: Any) -> bool:
    """Return whether an attribute is a mesh or a placement. Those are compared by value."""
    tensor, mesh = sys.modules.get("torch.distributed.tensor"), sys.modules.get("torch.distributed.device_mesh")
    return (tensor is not None and isinstance(value, tensor.Placement)) or (
        mesh is not None and isinstance(value, mesh.DeviceMesh)
    )


def is_style(value: Any) -> bool:
    """Return whether an object is a style of torch's tensor parallelism. Its hooks hold styles."""
    styles = sys.modules.get("torch.distributed.tensor.parallel")
    return styles is not None and isinstance(value, styles.ParallelStyle)


def runs_fsdp_hooks(module: nn.Module) -> bool:
    """Return whether `fully_shard` has hooks on a module, which gather and reduce. Its class alone does not say so."""
    return any(_is_of_fsdp(hook) for hooks in hook_dicts(module).values() for hook in hooks.values())


def remove_fsdp_hooks(module: nn.Module) -> None:
    """Take the hooks of `fully_shard` off a module. Nobody has handles of them."""
    for hooks in hook_dicts(module).values():
        for number in [number for number, hook in hooks.items() if _is_of_fsdp(hook)]:
            del hooks[number]


def _is_of_fsdp(hook: Any) -> bool:
    return "torch.distributed.fsdp." in (getattr(hook, "__module__", None) or "")


def wrapper_of(modules: Iterable[nn.Module]) -> str | None:
    """Return the name of the wrapper that manages the parameters of one of the modules, or None.

    Modules without the hooks of `fully_shard` are managed by who took them off.
    """
    candidates = tuple(modules)
    for name, attribute, called in _WRAPPERS:
        wrapper = getattr(sys.modules.get(name), attribute, ())
        wrapped_modules = [module for module in candidates if isinstance(module, wrapper)]
        if wrapped_modules and (called != "fully_shard" or any(map(runs_fsdp_hooks, wrapped_modules))):
            return called
    return None


def check_traceable(modules: Sequence[nn.Module], state: Sequence[Tensor]) -> None:
    """Raise RuntimeError if a stage runs collectives outside its forward, or a gradient would have another shape."""
    if wrapper := wrapper_of(modules):
        raise RuntimeError(f"{wrapper} runs collectives in hooks, which are outside of a graph")
    for tensor in filter(is_sharded, state):
        mesh, placements, *_ = layout(tensor)
        if any(placement.is_partial() for placement in placements):
            raise RuntimeError(f"a parameter or buffer of shape {list(tensor.shape)} is a partial DTensor")
        if mesh.get_coordinate() is None:
            raise RuntimeError(f"this rank is not in the mesh of a DTensor of shape {list(tensor.shape)}")


def check_outputs(outputs: Sequence[Any]) -> None:
    """Raise PipegraphError if a stage returns a DTensor."""
    for position, output in enumerate(outputs):
        if isinstance(output, Tensor) and is_sharded(output):
            layouts: Any = output
            raise PipegraphError(
                f"output {position} of the stage is a DTensor ({', '.join(map(str, layouts.placements))}); between "
                f"stages only plain tensors are sent.",
                "let the last module of the parallelize plan return local "
                "tensors (use_local_output=True), with the layout that the package's boundary has (Replicate()).",
            )


def waited(output: Any) -> Any:
    """Wait for the collective of a tensor. Return anything else itself."""
    return output if type(output) in _PLAIN or not isinstance(output, Tensor) else torch_waited(output)


def shards(tensor: Tensor, like: Any) -> Tensor:
    """Lay a whole tensor out as `like`. Every rank has the whole and takes its part, without communication."""
    if not is_sharded(like) or is_sharded(tensor) or tensor.shape != like.shape:
        return tensor  # it fits, or the caller refuses it
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        source = tensor.detach().to(like.device)
        return distribute_tensor(source, like.device_mesh, like.placements, src_data_rank=None)
