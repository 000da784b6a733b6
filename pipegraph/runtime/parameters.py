"""The parameters and buffers of a rank's stages, under the model's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from pipegraph.arguments import require_type
from pipegraph.errors import PackageError, PipegraphError, nearest
from pipegraph.kernels.sharded import is_sharded, shards
from pipegraph.package import CALLER, Manifest, Package
from pipegraph.progress import track
from pipegraph.runtime.replicas import check_replication, unwrapped
from pipegraph.torch_private.distributed import checkpointed

Stages = Mapping[int, nn.Module]

ParallelizeFunction = Callable[[nn.Module], nn.Module | None]
"""Changes a stage in place, or returns another module for it."""


def load_stages(
    package: Package,
    indices: list[int],
    device: torch.device,
    weights: str | PathLike[str] | None = None,
    check_weights: bool = True,
    seed: int = 0,
) -> dict[int, nn.Module]:
    """Load the stages `indices` on `device`, with the package's weights or those of the checkpoint `weights`.

    If the package was written without weights, they are initialised from `seed`, with a warning. With `check_weights`,
    every shard of the package that is read must be as it was written.
    """
    has_weights = weights is not None or package.has_weights
    if not has_weights:
        warnings.warn(
            f"{package.path} holds no weights: its parameters are initialised as the model does it, equally on every "
            "rank. A checkpoint's are read with --weights DIR, in Python with weights=.",
            stacklevel=3,
        )
    source: bool | str | PathLike[str] = has_weights if weights is None else weights
    if check_weights:
        package.check_weights(indices, source)
    stages = {}
    with torch.random.fork_rng(devices=[]):  # making layers must not move the caller's random numbers
        for index in track("loading weights of stages", indices):
            stages[index] = package.load_stage(index, str(device), source, seed)
    for index, stage in stages.items():
        missing, added = differing_names(package, index, stage)
        if missing or added:
            raise PackageError(
                f"stage {index} of {package.path} has other parameters than pipeline.json says: "
                f"missing {missing}, added {added}. Was it edited? Correct `parameters` there too."
            )
    return stages


def parallelize_stages(
    package: Package, stages: Stages, parallelize_fn: ParallelizeFunction
) -> tuple[dict[int, nn.Module], Manifest]:
    """Call `parallelize_fn` with each stage. Return the stages, and the manifest with the dtypes that they have now.

    Raises PipegraphError if it returns anything but a module with the same parameters, and more if it adds some.
    """
    require_type(parallelize_fn, Callable, "parallelize_fn is a function of a stage", "parallelize_fn=shard")
    old_dtypes = _dtypes(stages)
    changed: dict[int, nn.Module] = {}
    for index, stage in stages.items():
        returned: object = parallelize_fn(stage)
        if not isinstance(returned, nn.Module | None):
            raise PipegraphError(
                f"parallelize_fn returned a {type(returned).__name__} for stage {index}.\n"
                f"Try: return a module, or None if the stage was changed in place."
            )
        changed[index] = stage if returned is None else returned
        check_replication(index, changed[index])
        missing, added = differing_names(package, index, unwrapped(changed[index]))
        if missing:
            raise PipegraphError(
                f"parallelize_fn gave the parameters of stage {index} other names: missing {missing}, added {added}. "
                f"State dicts and tied weights go by names.\nTry: change the stage in place, as parallelize_module and "
                f"fully_shard do; an adapter as a parameter of the module that it adapts, not as one around it."
            )
    new_dtypes = _dtypes({index: unwrapped(stage) for index, stage in changed.items()})
    return changed, _converted(package.manifest, old_dtypes, new_dtypes)


def parameters_of(stage: nn.Module, every_name: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a stage under the model's names: each under its first one, or under `every_name`."""
    wrapped = _wrapped(stage)
    for name, parameter in nn.Module.named_parameters(stage, remove_duplicate=not every_name):
        yield _without(wrapped, name), parameter


def names_without_wrappers(stage: nn.Module) -> dict[str, str]:
    """The names of a stage's modules → the model's names for them."""
    wrapped = _wrapped(stage)
    return {name: _without(wrapped, name) for name, _ in stage.named_modules()}


def _wrapped(stage: nn.Module) -> set[str]:
    """The names of the modules that are inside a wrapper."""
    return {
        f"{name}.{place}" if name else place
        for name, module in stage.named_modules(remove_duplicate=False)
        if (inner := checkpointed(module)) is not None
        for place, child in module.named_children()
        if child is inner
    }


def owner_of(stage: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, by the model's name for it, and the parameter's name there."""
    path, _, attribute = name.rpartition(".")
    module = _inmost(stage)
    for part in path.split(".") if path else ():
        module = _inmost(module.get_submodule(part))
    return module, attribute


def parameter_at(stage: nn.Module, name: str) -> object:
    """What a stage has in a parameter's place, by the model's name for it; None if it has nothing there."""
    try:
        module, attribute = owner_of(stage, name)
    except AttributeError:  # the module is gone
        return None
    return getattr(module, attribute, None)


def _inmost(module: nn.Module) -> nn.Module:
    while (inner := checkpointed(module)) is not None:
        module = inner
    return module


def _without(wrapped: Collection[str], name: str) -> str:
    """The name without the parts at which a wrapper holds its module."""
    parts = name.split(".")
    return ".".join(part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in wrapped)


def named_parameters(stages: Stages) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, under its first name."""
    visited: set[int] = set()
    for stage in stages.values():
        for name, parameter in parameters_of(stage):
            if id(parameter) not in visited:
                visited.add(id(parameter))
                yield name, parameter


def redistribute_gradients(stages: Stages) -> None:
    """Give the gradient of each DTensor its parameter's placements, as `redistribute` does."""
    redistribute(parameter for stage in stages.values() for parameter in stage.parameters())


def redistribute(parameters: Iterable[nn.Parameter]) -> None:
    """Give the gradient of each DTensor its parameter's placements.

    Kernels that are traced do so themselves; autograd leaves sums over ranks to be made later. Collective: every rank
    of a DTensor's mesh must call it.
    """
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None and is_sharded(parameter) and gradient.placements != parameter.placements:  # type: ignore
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def computed_in(manifest: Manifest, dtype: torch.dtype, names: Collection[str]) -> Manifest:
    """The manifest of stages that compute in another dtype than that of their parameters, called `names`.

    What crosses between stages has that dtype, too, but for what the model keeps. The caller's inputs have their own.
    """
    to = str(dtype).removeprefix("torch.")
    values = {
        name: structs.replace(value, dtype=to)
        if value.producer != CALLER and value.dtype in names and value.keeps_dtype is not True
        else value
        for name, value in manifest.values.items()
    }
    return structs.replace(manifest, values=values)


def state_dict(stages: Stages) -> dict[str, Any]:
    """The model's own keys, for these stages: every name of a tied weight, and no buffer that is not persistent."""
    return {name: item for stage in stages.values() for name, item in stage.state_dict().items()}


def load_state_dict(manifest: Manifest, stages: Stages, state: Mapping[str, Tensor]) -> None:
    """Load the entries of these stages from a state dict of the whole model, or of these stages.

    A tied weight may be there under any of its names. Raises PackageError for names and shapes that do not fit.
    """
    model_names = {name for stage in manifest.stages for name in stage.parameters}
    model_names |= {buffer.name for stage in manifest.stages for buffer in stage.buffers} | {*state_dict(stages)}
    model_names |= {name for group in manifest.tied for name in group}
    for name in state:
        if name not in model_names:
            raise PackageError(
                f"the state dict holds {name}, which the package does not have.{nearest(name, model_names)}"
            )
    for index, stage in stages.items():
        stage_state = {}
        for name, like in stage.state_dict().items():
            names = [name, *(tied_name for group in manifest.tied if name in group for tied_name in group)]
            key = next((candidate for candidate in names if candidate in state), None)
            if key is None:
                raise PackageError(f"the state dict lacks {name}, of stage {index}.{nearest(name, state)}")
            stage_state[name] = shards(state[key], like)
        try:
            stage.load_state_dict(stage_state)
        except RuntimeError as error:
            raise PackageError(f"the state dict does not fit stage {index}: {error}") from None


def _dtypes(stages: Stages) -> dict[str, torch.dtype]:
    """The dtype of every parameter that holds floats."""
    return {name: parameter.dtype for name, parameter in named_parameters(stages) if parameter.is_floating_point()}


def _converted(
    manifest: Manifest, old_dtypes: Mapping[str, torch.dtype], new_dtypes: Mapping[str, torch.dtype]
) -> Manifest:
    """The manifest after `.to(dtype)` on every stage: values take the new dtype of the parameters that had theirs, but
    for those that the model keeps, such as a residual in float32.

    If some parameters kept the dtype, or they took several, values keep it as well: the stages then cast.
    """
    successors: dict[torch.dtype, set[torch.dtype]] = {}
    for name, dtype in old_dtypes.items():
        successors.setdefault(dtype, set()).add(new_dtypes.get(name, dtype))
    names = {
        str(old).removeprefix("torch."): str(*new).removeprefix("torch.")
        for old, new in successors.items()
        if len(new) == 1
    }
    values = {
        name: value if value.keeps_dtype is True else structs.replace(value, dtype=names.get(value.dtype, value.dtype))
        for name, value in manifest.values.items()
    }
    return structs.replace(manifest, values=values)


def differing_names(package: Package, index: int, stage: nn.Module) -> tuple[list[str], list[str]]:
    """The parameters that pipeline.json has and the stage does not, and those that the stage has in addition."""
    expected = {*package.manifest.stages[index].parameters}
    names = {name for name, _ in parameters_of(stage, every_name=True)}
    return sorted(expected - names), sorted(names - expected)
