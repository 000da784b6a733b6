"""Stages whose parameters torch's `fully_shard` has divided: which modules are gathered together, and what is whole.

fully_shard ─▶ parameters as DTensors, their dtypes ─┐
hooks that gather and reduce: taken off              ├─▶ ShardedGroup: what UNSHARD gathers and REDUCE_GRAD reduces
parameters before it ─▶ what a gathered one is like ─┘

A user may have called `fully_shard`; then what a gathered parameter is like follows from the part and its mesh.

The hooks gather for each microbatch again and belong to autograd. Here the schedule says when, and kernels compute with
plain parameters, which are in the modules during a step: empty, but for the time between UNSHARD and RESHARD.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipegraph.arguments import require_type
from pipegraph.errors import ArgumentError, nearest
from pipegraph.kernels.sharded import is_sharded, local, rebuilt, remove_fsdp_hooks, runs_fsdp_hooks
from pipegraph.runtime.processes.rank_grid import DATA, SHARD
from pipegraph.torch_private.dtensor import packed_place, sharding_policy
from pipegraph.torch_private.pytrees import pytree
from pipegraph.torch_private.tensors import has_hooks

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

_MESH_ARGUMENTS = ("module", "mesh", "dp_mesh_dims")
"""Arguments of `fully_shard` that follow from the mesh."""


class ShardedParameter:
    """A parameter of which this rank holds a part.

    Attributes:
        sharded: the part, a DTensor; what an optimizer changes.
        unsharded: what kernels compute with: the parameter before it was divided, in the dtype of computing. It has
            memory from `allocate` to `free`.
    """

    def __init__(self, places: Sequence[tuple[nn.Module, str]], parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self._places = places
        local_tensor = torch.empty_like(local(parameter.detach()), dtype=dtype, memory_format=torch.contiguous_format)
        self._memory = local_tensor.untyped_storage()
        self._bytes = self._memory.nbytes()
        self.unsharded = nn.Parameter(rebuilt(local_tensor, parameter), requires_grad=parameter.requires_grad)
        # `.data` has a separate version: autograd would take a second gather of the same values for an in-place change.
        self._local = local_tensor.data
        self.free()

    @property
    def sharded(self) -> nn.Parameter:
        return self._sharded

    def find(self) -> None:
        """Take the part that the modules hold now."""
        module, name = self._places[0]
        self._sharded: nn.Parameter = getattr(module, name)

    @property
    def is_held(self) -> bool:
        """Whether the modules hold that part."""
        return all(getattr(module, name, None) is self._sharded for module, name in self._places)

    @property
    def local_whole(self) -> Tensor:
        """The memory of `unsharded`: with tensor parallelism it is what this rank computes with."""
        return self._local

    def set_in_modules(self, is_whole: bool) -> None:
        """Let the modules hold the whole parameter, or the part."""
        if is_whole:
            self.unsharded.requires_grad_(self._sharded.requires_grad)
        for module, name in self._places:
            setattr(module, name, self.unsharded if is_whole else self._sharded)

    def allocate(self) -> None:
        self._memory.resize_(self._bytes)

    def free(self) -> None:
        self._memory.resize_(0)

    def dim(self, mesh_dim: str) -> int:
        """The dimension along which it is divided."""
        layout: Any = self._sharded
        place = layout.device_mesh.mesh_dim_names.index(mesh_dim)
        dim: int = layout.placements[place].dim
        return dim


@dataclass(frozen=True)
class ShardedGroup:
    """The parameters that are gathered and reduced in one message: those of one call of `fully_shard`, of one dtype.

    Attributes:
        reduce_dtype: in which gradients are added up; None for that of computing.
    """

    parameters: tuple[ShardedParameter, ...]
    reduce_dtype: torch.dtype | None


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for what `fully_shard` does not take."""
    from torch.distributed.fsdp import fully_shard

    example = 'fsdp={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}'
    require_type(options, Mapping, "fsdp has the options of torch's fully_shard", example)
    option_names = [name for name in inspect.signature(fully_shard).parameters if name not in _MESH_ARGUMENTS]
    for name, value in options.items():
        if name not in option_names:
            raise ArgumentError(
                f"fully_shard has no option {name!r} for fsdp.{nearest(str(name), option_names)} "
                f"There are: {', '.join(option_names)}."
            )
        if name == "reshard_after_forward" and not isinstance(value, bool | None):
            raise ArgumentError(
                f"reshard_after_forward={value!r} would keep a part of the parameters, and a schedule gathers all of "
                "them.",
                "True or False, and Pipeline(resident=…) for how many stages may be whole at a time.",
            )


def fully_shard_stage(stage: nn.Module, mesh: DeviceMesh, options: Mapping[str, Any]) -> list[ShardedGroup]:
    """Divide a stage's parameters, each repeated layer a group, and what is left of the stage another one.

    Args:
        stage: changed in place.
        mesh: of one dimension, or of two, along the first of which parts are replicated.
        options: those of `fully_shard`.

    A parameter without dimensions cannot be divided. Every rank has all of it, and its gradient is added up.

    Raises:
        ArgumentError: a parameter has a hook, which its part would lose, or is divided already where it would be again.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = options.get("mp_policy", MixedPrecisionPolicy())
    scalars = {parameter for parameter in stage.parameters() if not parameter.dim()}
    if scalars:
        options = {**options, "ignored_params": scalars | set(options.get("ignored_params") or ())}
    options = {**options, "shard_placement_fn": _placement_function(stage, mesh, options.get("shard_placement_fn"))}
    hooked = next((name for name, parameter in stage.named_parameters() if has_hooks(parameter)), None)
    if hooked is not None:
        raise ArgumentError(
            f"parallelize_fn gave {hooked} a hook, which would not be called: along dp_shard modules compute with the "
            "whole parameter.",
            "without the hook; what it does with gradients can be done with .grad after step().",
        )
    groups: list[ShardedGroup] = []
    for module in (*repeated_layers(stage), stage):
        sharded_ids = {id(member.unsharded) for group in groups for member in group.parameters}
        parameter_places = _places(module)
        fully_shard(module, mesh=mesh, **options)
        remove_fsdp_hooks(module)
        parameters = []
        for parameter, places in parameter_places:
            owner, name = places[0]
            if getattr(owner, name) is not parameter and id(parameter) not in sharded_ids:
                parameters.append(ShardedParameter(places, parameter, _compute_dtype(parameter, policy)))
        _cast_at(module, policy)
        groups += _groups_by_dtype(parameters, policy)
    return groups


def sharded_modules(stage: nn.Module) -> list[nn.Module]:
    """The modules to which a user has applied `fully_shard`, each before those around it."""
    return [module for module in reversed(list(stage.modules())) if runs_fsdp_hooks(module)]


def adopt_groups(index: int, stage: nn.Module, mesh: DeviceMesh, device: torch.device) -> list[ShardedGroup]:
    """Take over what a user has divided by `fully_shard`, each call of it a group. Its hooks are taken off.

    Parameters that are in no such module stay whole.

    Args:
        stage: changed in place.
        mesh: as for `fully_shard_stage`.
        device: where the stage computes.

    Raises:
        ArgumentError: a parameter is divided between other ranks than those of the mesh.
    """
    groups: list[ShardedGroup] = []
    names = {id(stage_parameter): name for name, stage_parameter in stage.named_parameters()}
    sharded_ids: set[int] = set()
    for module in sharded_modules(stage):
        policy, parameters = sharding_policy(module), []
        for parameter, places in _places(module):
            if id(parameter) not in sharded_ids and is_sharded(parameter) and not _only_tensor_parallel(parameter):
                sharded_ids.add(id(parameter))
                if _ranks_of(parameter) != mesh[SHARD].mesh.tolist():
                    raise ArgumentError(
                        f"parallelize_fn divides {names[id(parameter)]} of stage {index} by fully_shard between other "
                        "ranks than those along dp_shard.",
                        'fully_shard(module, mesh=mesh["dp_shard"]), with the mesh that Pipeline is given.',
                    )
                unsharded = _whole_like(parameter, device)
                parameters.append(ShardedParameter(places, unsharded, _compute_dtype(parameter, policy)))
        remove_fsdp_hooks(module)
        _cast_at(module, policy)
        groups += _groups_by_dtype(parameters, policy)
    return groups[::-1]


def _groups_by_dtype(parameters: Sequence[ShardedParameter], policy: Any) -> list[ShardedGroup]:
    """A group for each dtype that is computed with: a message has one, and in another one values would be rounded."""
    by_dtype: dict[torch.dtype, list[ShardedParameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.unsharded.dtype, []).append(parameter)
    return [ShardedGroup(tuple(members), policy.reduce_dtype) for members in by_dtype.values()]


def _names_of(parameter: Any) -> tuple[str, ...]:
    return tuple(parameter.device_mesh.mesh_dim_names or ())


def _only_tensor_parallel(parameter: Any) -> bool:
    names = _names_of(parameter)
    return bool(names) and not {*names} & {*DATA}


def _ranks_of(parameter: Any) -> Any:
    """Between which ranks `fully_shard` divides a parameter; None if they have no name of ours."""
    return parameter.device_mesh[SHARD].mesh.tolist() if SHARD in _names_of(parameter) else None


def _whole_like(parameter: Any, device: torch.device) -> nn.Parameter:
    """What a parameter was before `fully_shard`: plain, or divided along the other dimensions of its mesh."""
    mesh_dims = [place for place, name in enumerate(_names_of(parameter)) if name not in DATA]
    if not mesh_dims:
        return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), parameter.requires_grad)
    from torch.distributed.tensor import empty

    mesh = parameter.device_mesh[tuple(_names_of(parameter)[place] for place in mesh_dims)]
    placements = [parameter.placements[place] for place in mesh_dims]
    unsharded = empty(parameter.shape, dtype=parameter.dtype, device_mesh=mesh, placements=placements)
    return nn.Parameter(unsharded, parameter.requires_grad)


def _placement_function(stage: nn.Module, mesh: DeviceMesh, placement_fn: Any) -> Callable[[nn.Parameter], Any]:
    """What says along which dimension a parameter is divided: as `placement_fn`, or the default.

    A dimension that tensor parallelism divides as a packed one is not divided again: torch would lose the order.
    """
    from torch.distributed.tensor import Shard

    names, shards = {id(parameter): name for name, parameter in stage.named_parameters()}, mesh.shape[-1]

    def place(parameter: nn.Parameter) -> Any:
        chosen, packed = None if placement_fn is None else placement_fn(parameter), packed_place(parameter)
        if packed is None or (chosen is not None and chosen.dim != packed.dim):
            return chosen
        free = [dim for dim, length in enumerate(parameter.shape) if dim != packed.dim and length % shards == 0]
        if chosen is not None or not free:
            raise ArgumentError(
                f"tp_plan divides dimension {packed.dim} of {names[id(parameter)]} as a packed one, and the {shards} "
                "ranks along dp_shard cannot divide it again.",
                "dp_replicate in place of dp_shard, or a layer without a bias.",
            )
        return Shard(free[0])

    return place


def repeated_layers(stage: nn.Module) -> list[nn.Module]:
    """The items of the outermost lists and sequences of modules, if they have modules of their own, and their
    parameters alone."""
    candidates: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and any(
                True for _ in child.children()
            ):
                candidates.append(child)
            else:
                walk(child)

    walk(stage)
    layers = list(dict.fromkeys(candidates))
    uses: dict[int, int] = {}
    for module in stage.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def is_alone(layer: nn.Module) -> bool:
        layer_uses: dict[int, int] = {}
        for module in layer.modules():
            for parameter in module.parameters(recurse=False):
                layer_uses[id(parameter)] = layer_uses.get(id(parameter), 0) + 1
        return bool(layer_uses) and all(uses[key] == count for key, count in layer_uses.items())

    return [layer for layer in layers if is_alone(layer)]


def _places(module: nn.Module) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Every parameter of a module, with all places where it or its children hold it."""
    places_by_id: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places_by_id.setdefault(id(parameter), (parameter, []))[1].append((owner, name))
    return list(places_by_id.values())


def _compute_dtype(parameter: nn.Parameter, policy: Any) -> torch.dtype:
    is_float = parameter.dtype.is_floating_point
    dtype: torch.dtype = policy.param_dtype if policy.param_dtype is not None and is_float else parameter.dtype
    return dtype


def _cast_at(module: nn.Module, policy: Any) -> None:
    """Cast what a module takes and returns, as the hooks of `fully_shard` do."""
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        module.register_forward_pre_hook(partial(_cast_inputs, policy.param_dtype), prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(partial(_cast_outputs, policy.output_dtype))


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(dtype, args), _cast(dtype, kwargs)


def _cast_outputs(dtype: torch.dtype, _: nn.Module, args: Any, outputs: Any) -> Any:
    return _cast(dtype, outputs)


def _cast(dtype: torch.dtype, values: Any) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return pytree.tree_map(cast, values)
