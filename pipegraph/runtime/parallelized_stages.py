"""The stages of a process after the dimensions of its mesh: their parameters divided between the ranks that share them.

Nothing here is sent but what the ranks refuse, so that all of them refuse it with the same words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from pipegraph.arguments import argument
from pipegraph.errors import ArgumentError, PipegraphError
from pipegraph.kernels.sharded import layout_text, wrapper_of
from pipegraph.package import Manifest, Value
from pipegraph.package.prediction import Prediction
from pipegraph.runtime import tensor_parallel
from pipegraph.runtime.fully_sharded import (
    ShardedGroup,
    adopt_groups,
    check_options,
    fully_shard_stage,
    sharded_modules,
)
from pipegraph.runtime.parameters import computed_in, find_ties, owner_of
from pipegraph.runtime.precision import check_batch_norms
from pipegraph.runtime.processes.rank_grid import DATA, DIMENSIONS, REPLICATE, SHARD, TENSOR
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.tp_check import DivisionCheck, failed_in, running_modules
from pipegraph.runtime.wiring import torch_dtype, zeros_for
from pipegraph.torch_private.dtensor import sharding_policy, sharding_ranks
from pipegraph.torch_private.fake_tensors import fake_tensors

# ---- divided boundaries ----------------------------------------------------------------------------------------------
# What stages take and return once their parameters are divided: the whole on every rank, or a part on each.
#
# With sequence parallelism each rank has a part of the sequence also between stages, and sends that part alone. It is
# found by running the stages without memory, one after the other; what a stage returns is what the next ones take.


Shapes = dict[str, list[int]]
"""value → its shape on a rank"""


def divided_boundaries(
    stages: Mapping[int, nn.Module], manifest: Manifest, size: int, gather_text: Callable[[str], Sequence[str]]
) -> Manifest:
    """The manifest with the shapes that values have on each of `size` ranks which divide the stages.

    Args:
        gather_text: gives a text to all ranks of this pipeline, and returns those of all. Collective.

    Raises:
        ArgumentError: a stage does not run, as with a number of heads that does not divide, or returns something else
            than the whole or a part along one dimension, or the model's own output is a part; on every rank.
    """
    sizes = divisible_sizes(manifest, size)
    shapes: Shapes = {name: list(value.shape_at(sizes)) for name, value in manifest.values.items()}
    for index in range(len(manifest.stages)):
        problem, returned = None, Shapes()
        if index in stages:
            try:
                returned = _run(index, stages[index], manifest, shapes)
                for name, output_shape in returned.items():
                    _check(manifest.values[name], output_shape, manifest.values[name].shape_at(sizes), index, size)
            except ArgumentError as error:
                problem = str(error)
        for text in gather_text(json.dumps([problem, returned])):
            problem, returned = json.loads(text)
            if problem is not None:
                raise ArgumentError(problem)
            shapes |= returned
    values, conditions = {}, list(manifest.conditions)
    for name, value in manifest.values.items():
        shape = [
            dimension if local_size == full_size else _part(dimension, size)
            for dimension, local_size, full_size in zip(value.shape, shapes[name], value.shape_at(sizes), strict=True)
        ]
        pairs = zip(value.shape, shape, strict=True)
        conditions += [f"({old}) % {size} == 0" for old, new in pairs if old != new and isinstance(old, str)]
        values[name] = structs.replace(value, shape=tuple(shape))
    if values == manifest.values:
        return manifest
    varying = {name: structs.replace(named_size, captured=sizes[name]) for name, named_size in manifest.sizes.items()}
    return structs.replace(manifest, values=values, sizes=varying, conditions=tuple(dict.fromkeys(conditions)))


def _run(index: int, stage: nn.Module, manifest: Manifest, shapes: Shapes) -> Shapes:
    """Run a stage without memory on inputs of these shapes. Return the shapes of its outputs."""
    entry, values = manifest.stages[index], manifest.values
    device = next((parameter.device for parameter in stage.parameters()), torch.device("cpu"))
    with fake_tensors(), torch.no_grad():
        input_values = [values[name] for name in entry.inputs]
        inputs = [zeros_for(value, shapes[value.name], torch_dtype(value), device) for value in input_values]
        with running_modules(stage) as running:
            try:
                returned = stage(*inputs)
            except PipegraphError:
                raise
            except Exception as error:  # whatever an operation raises on a part of a tensor
                raise ArgumentError(_refusal(index, running, error)) from error
    outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
    named = zip(entry.outputs, outputs, strict=False)
    return {name: list(output.shape) for name, output in named if isinstance(output, Tensor)}


def _refusal(index: int, running: list[str], error: Exception) -> str:
    where = failed_in(running)
    style = f"a style for {running[-1]} that fits what it takes" if where else "styles that fit each other"
    return (
        f"stage {index} does not run with its parameters divided along tp{where}: "
        f"{type(error).__name__}: {str(error).splitlines()[0]}\n"
        f'Try: {style}, as "rowwise" fits what "colwise" returns, and all others what "colwise_gather_output" does; '
        "or a tp that divides the numbers of heads, key-value heads and features."
    )


def _check(value: Value, shape: Sequence[int], full: Sequence[int], index: int, size: int) -> None:
    """Raise ArgumentError unless a value is the whole, or a part that may cross to another stage."""
    differing = [place for place, pair in enumerate(zip(shape, full, strict=False)) if pair[0] != pair[1]]
    if len(shape) == len(full) and not differing:
        return
    is_part = len(shape) == len(full) and len(differing) == 1 and shape[differing[0]] * size == full[differing[0]]
    if is_part and any(consumer > index for consumer in value.consumers) and value.batch_dim != differing[0]:
        return
    raise ArgumentError(
        f"stage {index} returns {value.name} as {list(shape)} on each of {size} ranks, and the whole is {list(full)}.",
        'a style that gathers, such as "colwise_gather_output", for the module that makes it. Only between '
        "stages may a value be a part, along one dimension other than the batch.",
    )


def _part(dimension: int | str, size: int) -> int | str:
    return dimension // size if isinstance(dimension, int) else f"({dimension}) // {size}"


def divisible_sizes(manifest: Manifest, size: int) -> dict[str, int]:
    """Return sizes near the captured ones that `size` ranks can divide evenly, if the maximum of a size allows it."""
    return {name: _divisible(named_size.captured, named_size.max, size) for name, named_size in manifest.sizes.items()}


def _divisible(captured: int, most: int | None, size: int) -> int:
    """A size near the captured one that can be divided evenly."""
    above = math.ceil(captured / size) * size
    return above if most is None or above <= most else max(size, captured // size * size)


# ---- parallelized stages ---------------------------------------------------------------------------------------------


def check_is_used(name: str, value: object, dimension: str, world: World | None) -> None:
    """Raise ArgumentError if an argument was given, and the pipeline's ranks have not the dimension that it is for."""
    if value is not None and (world is None or dimension not in world.grid.names):
        raise ArgumentError(
            f'{argument(name)} is for ranks along "{dimension}", and this pipeline has none of them.',
            f'mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "{dimension}")); or leave it out.',
        )


def divide_tensors(
    stages: Mapping[int, nn.Module],
    manifest: Manifest,
    world: World | None,
    plan: tensor_parallel.Plan | None,
    others_divide: bool,
) -> Manifest:
    """Divide parameters between the ranks along `tp`, in place. Collective.

    Args:
        plan: as for `Pipeline`; by default the package's own.
        others_divide: whether `parallelize_fn` may do it without a plan.

    Returns:
        The manifest with the shapes that values have on each rank.

    Raises:
        ArgumentError: the plan does not fit the model, or the number of ranks; on every rank.
    """
    if plan is not None:
        tensor_parallel.check_plan(plan)
        check_is_used("tp_plan", plan, TENSOR, world)
    is_own, plan = plan is not None, plan or manifest.tp_plan or None
    size = 1 if world is None else world.grid.length(TENSOR)
    if world is None or size == 1 or (others_divide and not is_own):
        return manifest
    mesh = world.mesh(TENSOR)
    names = "\n".join(tensor_parallel.module_names(stages))
    model_names = {name for text in world.gather_text(names, *DIMENSIONS) for name in text.split("\n")}

    def check_plan() -> None:
        tensor_parallel.require_plan(plan, size)
        assert plan is not None
        tensor_parallel.check_plan(plan)
        if is_own:  # that of a package may be of a whole family of models
            tensor_parallel.check_patterns(plan, model_names)

    _together(world, check_plan)
    assert plan is not None
    parts = {index: tensor_parallel.divided_inputs(stage, plan) for index, stage in stages.items()}
    check = DivisionCheck(stages, manifest, divisible_sizes(manifest, size), mesh.get_local_rank(), size, parts)
    _together(world, partial(tensor_parallel.parallelize, stages, plan, manifest, mesh))
    _check_ties(stages, manifest, world, "tp_plan")
    divided = divided_boundaries(stages, manifest, size, world.gather_text)
    world.check_everywhere(check.problem(stages, divided))
    return divided


def shard_stages(
    stages: Mapping[int, nn.Module],
    manifest: Manifest,
    world: World | None,
    options: Mapping[str, Any] | None,
) -> tuple[dict[int, list[ShardedGroup]], Manifest]:
    """Divide parameters between the ranks along `dp_shard`, in place, or take over what is divided. Collective.

    Args:
        options: as for `Pipeline`.

    Returns:
        The groups of each stage, and the manifest with the dtypes in which the stages compute.

    Raises:
        ArgumentError: the options do not fit, or not what `parallelize_fn` has done; on every rank.
    """
    if options is not None:
        check_options(options)
    if world is None:
        return {}, manifest
    _together(world, partial(_check_sharding_ranks, stages, world))
    if world.grid.length(SHARD) == 1:
        return {}, manifest
    has_replicas = world.grid.length(REPLICATE) > 1
    mesh = world.mesh(*(DATA if has_replicas else (SHARD,)))
    dtypes = {
        str(parameter.dtype).removeprefix("torch.") for stage in stages.values() for parameter in stage.parameters()
    }
    groups: dict[int, list[ShardedGroup]] = {}
    policies = {(options or {}).get("mp_policy")}

    def shard() -> None:
        for index, stage in stages.items():
            wrapper = wrapper_of(stage.modules())
            if wrapper == "fully_shard" and options is None:
                policies.update(map(sharding_policy, sharded_modules(stage)))
                groups[index] = adopt_groups(index, stage, mesh, world.device)
            elif wrapper is not None:
                raise ArgumentError(
                    f"parallelize_fn applied {wrapper} to stage {index}, and the mesh has ranks along dp_shard, "
                    "between which the pipeline divides the parameters.",
                    "the stage without it, and its options as fsdp=…; or fully_shard with all of its options, "
                    "and neither fsdp nor precision.",
                )
            else:
                check_batch_norms(stage, (options or {}).get("mp_policy"))
                groups[index] = fully_shard_stage(stage, mesh, options or {})

    _together(world, shard)
    _check_ties(stages, manifest, world, "fsdp")
    policy = (
        next((candidate_policy for candidate_policy in policies if candidate_policy is not None), None)
        if len(policies - {None}) == 1
        else None
    )
    dtype = None if policy is None else policy.output_dtype or policy.param_dtype
    return groups, manifest if dtype is None else computed_in(manifest, dtype, dtypes)


def resident_stages(
    options: Mapping[str, Any] | None, resident: int | None, plan: Prediction | None = None
) -> int | None:
    """How many sharded stages of a rank may be whole at a time, by default as planned; None for all.

    Raises ArgumentError.
    """
    if resident is not None and (type(resident) is not int or resident < 1):
        raise ArgumentError(
            f"resident cannot be {resident!r}: it is how many stages of a rank may be whole.", "1 or more."
        )
    if resident is None and plan is not None and plan.resident is not None:
        return plan.resident
    return 2 if resident is None and (options or {}).get("reshard_after_forward") else resident


def _check_sharding_ranks(stages: Mapping[int, nn.Module], world: World) -> None:
    """Raise ArgumentError if `parallelize_fn` applied `fully_shard` over ranks of the pipeline that are not for it.

    A user's mesh over ranks of other pipelines is allowed.
    """
    for index, stage in stages.items():
        names = {module: name for name, module in stage.named_modules()}
        for module in sharded_modules(stage):
            dividing, reducing = map(world.dimensions_between, sharding_ranks(module))
            if dividing | reducing and (dividing != {SHARD} or reducing - {*DATA}):
                where = f"{names[module]} of stage {index}" if names[module] else f"stage {index}"
                along = ", ".join(name for name in world.grid.names if name in dividing | reducing)
                raise ArgumentError(
                    f"parallelize_fn applied fully_shard to {where} over the ranks along {along}. It may divide "
                    f"parameters between the ranks along {SHARD} alone, and copy them along {REPLICATE}.",
                    f"{_sharding_advice(dividing | reducing, world)}",
                )


def _sharding_advice(along: set[str], world: World) -> str:
    if world.grid.length(SHARD) > 1:
        return f'fully_shard(module, mesh=mesh["{SHARD}"]), or mesh["{REPLICATE}", "{SHARD}"] for HSDP.'
    if along == {REPLICATE}:
        return (
            f'"{SHARD}" in place of "{REPLICATE}" in mesh_dim_names; or the stage without it: each rank along '
            f"{REPLICATE} has a copy, whose gradients the pipeline adds up."
        )
    return f'a mesh that has a dimension "{SHARD}" as well, and fully_shard(module, mesh=mesh["{SHARD}"]).'


def _check_ties(stages: Mapping[int, nn.Module], manifest: Manifest, world: World, by: str) -> None:
    """Raise ArgumentError, on every rank, if the copies of a tied weight are divided differently. Collective."""
    ties = find_ties(manifest)
    if not ties:
        return
    local_layouts = {}
    for stage, name in (place for tie in ties for place in tie.places if place[0] in stages):
        module, attribute = owner_of(stages[stage], name)
        local_layouts[f"{stage} {name}"] = layout_text(getattr(module, attribute))
    layouts: dict[str, str] = {}
    for text in world.gather_text(json.dumps(local_layouts), *DIMENSIONS):
        layouts |= json.loads(text)
    for tie in ties:
        (first, of_first), *other_copies = [(place, layouts[f"{place[0]} {place[1]}"]) for place in tie.places]
        for copy, layout in other_copies:
            if layout != of_first:
                raise ArgumentError(
                    f"{argument(by)} leaves {first[1]} of stage {first[0]} as {of_first}, and {copy[1]} of stage "
                    f"{copy[0]}, which is the same parameter, as {layout}.",
                    'what divides both alike, such as the styles "embedding_rowwise" and "colwise_gather_output".',
                )


def _together(world: World, work: Callable[[], None]) -> None:
    """Do what may be refused on one rank. Every rank then raises the same ArgumentError."""
    problem = None
    try:
        work()
    except ArgumentError as error:
        problem = str(error)
    world.check_everywhere(problem)
