"""Sharded parameters: torch's DTensor, of which a graph holds the local tensor alone.

local tensor ─ rebuilt ─▶ DTensor, which the module computes with ─▶ gradient in the parameter's placements, local

DTensor's own dispatch leaves local operations and functional collectives in a graph. All ranks of a mesh divide the
same graph in the same way, so that their collectives meet: what a division goes by is which operations there are, and
never a size, as shards may differ in size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels import internals

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

_WRAPPERS = (
    ("torch.distributed.fsdp", "FSDPModule", "fully_shard"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel"),
    ("torch.nn.parallel", "DistributedDataParallel", "DistributedDataParallel"),
)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; without importing torch.distributed, where nothing is."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, the same memory, without autograd; any other tensor itself."""
    return internals.local_tensor(tensor) if is_sharded(tensor) else tensor


def differentiable_local(tensor: Any) -> Tensor:
    """The same, for autograd to see."""
    found: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return found


def rebuilt(tensor: Tensor, like: Any) -> Tensor:
    """A DTensor as `like` is, around this local tensor; the tensor itself where `like` is none.

    Its gradient is redistributed to the placements of `like`, and the tensor's is the local part of that.
    """
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def layout(tensor: Any) -> Any:
    """How a DTensor is laid out over which ranks, hashable; None of another tensor."""
    if not is_sharded(tensor):
        return None
    return tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tensor.stride()


def layout_text(tensor: Any) -> str:
    """The same for a message, or to compare with another rank, whose mesh is its own."""
    if not is_sharded(tensor):
        return "whole on every rank"
    return f"{', '.join(map(str, tensor.placements))} over {' × '.join(map(str, tensor.device_mesh.shape))} ranks"


def is_layout(value: Any) -> bool:
    """Whether an attribute is a mesh or a placement, which are equal by value."""
    tensor, mesh = sys.modules.get("torch.distributed.tensor"), sys.modules.get("torch.distributed.device_mesh")
    return (tensor is not None and isinstance(value, tensor.Placement)) or (
        mesh is not None and isinstance(value, mesh.DeviceMesh)
    )


def is_style(value: Any) -> bool:
    """Whether it is a style of torch's tensor parallelism, which its hooks hold, and which is what it is made of."""
    styles = sys.modules.get("torch.distributed.tensor.parallel")
    return styles is not None and isinstance(value, styles.ParallelStyle)


def wrapper_of(modules: Iterable[nn.Module]) -> str | None:
    """What has taken the parameters of one of the modules into its own hands; None where nothing has."""
    held = tuple(modules)
    for name, attribute, called in _WRAPPERS:
        wrapper = getattr(sys.modules.get(name), attribute, ())
        if any(isinstance(module, wrapper) for module in held):
            return called
    return None


def check_traceable(modules: Sequence[nn.Module], state: Sequence[Tensor]) -> None:
    """RuntimeError where the parallelism of a stage is not in its forward, or a shard has no gradient of its shape."""
    if wrapper := wrapper_of(modules):
        raise RuntimeError(f"{wrapper} runs collectives in hooks, which are outside of a graph")
    for tensor in filter(is_sharded, state):
        mesh, placements, *_ = layout(tensor)
        if any(placement.is_partial() for placement in placements):
            raise RuntimeError(f"a parameter or buffer of shape {list(tensor.shape)} is a partial DTensor")
        if mesh.get_coordinate() is None:
            raise RuntimeError(f"this rank is not in the mesh of a DTensor of shape {list(tensor.shape)}")


def check_outputs(outputs: Sequence[Any]) -> None:
    """PipegraphError where a stage returns a DTensor."""
    for position, output in enumerate(outputs):
        if isinstance(output, Tensor) and is_sharded(output):
            layouts: Any = output
            raise PipegraphError(
                f"output {position} of the stage is a DTensor ({', '.join(map(str, layouts.placements))}); between "
                f"stages only plain tensors are sent.\nTry: let the last module of the parallelize plan return local "
                f"tensors (use_local_output=True), with the layout that the package's boundary has (Replicate())."
            )


def waited(output: Any) -> Any:
    """A tensor whose collective may still run, once it has; anything else itself."""
    return output if type(output) in _PLAIN or not isinstance(output, Tensor) else internals.waited(output)


def shards(tensor: Tensor, like: Any) -> Tensor:
    """A whole tensor in the layout of `like`, without communication: every rank has the whole, and takes its part."""
    if not is_sharded(like) or is_sharded(tensor) or tensor.shape != like.shape:
        return tensor  # which fits, or is refused by whoever loads it
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        given = tensor.detach().to(like.device)
        return distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None)
