"""The parameters and buffers of a rank's stages, under the model's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from pipegraph.arguments import require_type
from pipegraph.errors import PackageError, PipegraphError, nearest
from pipegraph.kernels.sharded import is_sharded, layout, layout_text, local, rebuilt, shards, wrapper_of
from pipegraph.package import CALLER, Manifest, Package
from pipegraph.package.folder import WeightSource
from pipegraph.progress import track
from pipegraph.runtime.processes.group import Group
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.replicas import check_replication, unwrapped
from pipegraph.torch_private.distributed import checkpointed

# ---- storage ---------------------------------------------------------------------------------------------------------
# The storages of tensors: which tensors share memory.


def storage_address(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins: equal for two tensors that share memory. A sparse tensor has none."""
    return id(tensor) if tensor.layout is not torch.strided else tensor.untyped_storage().data_ptr()


def share_memory(tensors: Iterable[Any], other_tensors: Iterable[Tensor]) -> bool:
    """Whether one of `tensors` uses the storage of one of the others. Items that are no tensors are skipped."""
    addresses = set(map(storage_address, other_tensors))
    return any(isinstance(item, Tensor) and storage_address(item) in addresses for item in tensors)


# ---- parameters ------------------------------------------------------------------------------------------------------


Stages = Mapping[int, nn.Module]

ParallelizeFunction = Callable[[nn.Module], nn.Module | None]
"""Changes a stage in place, or returns another module for it."""


def load_stages(
    package: Package,
    indices: list[int],
    device: torch.device,
    weights: Path | Mapping[str, Tensor] | None = None,
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
    source: WeightSource = has_weights if weights is None else weights
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
                f"parallelize_fn returned a {type(returned).__name__} for stage {index}.",
                "return a module, or None if the stage was changed in place.",
            )
        changed[index] = stage if returned is None else returned
        check_replication(index, changed[index])
        missing, added = differing_names(package, index, unwrapped(changed[index]))
        if missing:
            raise PipegraphError(
                f"parallelize_fn gave the parameters of stage {index} other names: missing {missing}, added {added}. "
                f"State dicts and tied weights go by names.",
                "change the stage in place, as parallelize_module and "
                "fully_shard do; an adapter as a parameter of the module that it adapts, not as one around it.",
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


# ---- ties ------------------------------------------------------------------------------------------------------------
# Tied weights: one parameter that several stages use.
#
# Stages of one process share one `nn.Parameter`. Across ranks every copy starts as the first stage's. At the end of a
# step the copies' gradients are summed, so that every copy holds the whole gradient and the copies never drift apart.
#
# Gradients are first summed within each stage and then over the stages in order, also within one process: the sum is
# bitwise equal for every placement of the stages.
#
# rank 0: stages 0, 3 ─ g0, g3 ─┐
# rank 1: stages 1, 2 ─ g1, g2 ─┴─▶ ((g0 + g1) + g2) + g3 on both


@dataclass(frozen=True)
class Tie:
    """The places of one parameter: (stage, name), in the order of the stages."""

    places: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that have it, ascending."""
        return tuple(dict.fromkeys(stage for stage, _ in self.places))

    def ranks(self, placement: Sequence[int]) -> tuple[int, ...]:
        """The ranks that hold a copy, ascending."""
        return tuple(sorted({placement[stage] for stage, _ in self.places}))

    def owner(self, placement: Sequence[int]) -> int:
        """The rank of the first stage that has it."""
        return placement[self.places[0][0]]


def find_ties(manifest: Manifest) -> tuple[Tie, ...]:
    """Return every parameter with several places, under one name or several, in the order of its first place."""
    places: dict[str, list[tuple[int, str]]] = {}
    for stage in manifest.stages:
        for name in stage.parameters:
            places.setdefault(manifest.stored_name(name), []).append((stage.index, name))
    return tuple(Tie(tuple(parameter_places)) for parameter_places in places.values() if len(parameter_places) > 1)


class TiedParameter:
    """A tied weight as this process has it: one parameter for all of its stages.

    Attributes:
        parameter: of all stages here.
        adds_by_stage: whether the gradients of several stages here are kept apart until the end of a step.
        group: the ranks that have copies; None if this process has all of them.
    """

    def __init__(self, tie: Tie, parameter: nn.Parameter, placement: Sequence[int], ranks: Collection[int]) -> None:
        self.tie, self.parameter = tie, parameter
        self.is_owned = tie.owner(placement) in ranks
        self.ranks = tie.ranks(placement)
        self.group: Group | None = None
        self._holders = tuple(placement[stage] for stage in tie.stages)
        self._local_stages = [stage for stage in tie.stages if placement[stage] in ranks]
        self.adds_by_stage = len(self._local_stages) > 1
        self._is_summed_whole = False
        self._sums: dict[int, Tensor | None] = {}

    @property
    def holders(self) -> tuple[int, ...]:
        """The rank of each gradient that is added up, in the order of the stages: the same on every rank."""
        return tuple(dict.fromkeys(self._holders)) if self._is_summed_whole else self._holders

    def add_up_together(self) -> None:
        """Add the gradients of all stages of each rank up in one sum."""
        self.adds_by_stage, self._is_summed_whole = False, True

    def begin(self, stage: int) -> None:
        """Let `.grad` be that of a stage."""
        self.parameter.grad = self._sums.pop(stage, None)

    def end(self, stage: int) -> None:
        """Keep the gradient of a stage."""
        self._sums[stage], self.parameter.grad = self.parameter.grad, None

    def redistribute_gradients(self) -> None:
        """Give the gradients that are kept apart the parameter's placements, as `redistribute` does."""
        for stage in self._local_stages if self.adds_by_stage else ():
            self.begin(stage)
            redistribute([self.parameter])
            self.end(stage)

    def gradients(self) -> list[Tensor | None]:
        """The gradients of this process's stages, in their order."""
        return [self._sums.get(stage) for stage in self._local_stages] if self.adds_by_stage else [self.parameter.grad]

    def add_up(self) -> None:
        """Let `.grad` be the sum of the gradients of this process's stages."""
        gradients = [gradient for gradient in self.gradients() if gradient is not None]
        self.parameter.grad = reduce(Tensor.add_, gradients) if gradients else None

    def clear(self) -> None:
        """Forget the gradients of single stages."""
        self._sums.clear()


class TiedWeights:
    """The tied weights of this process's stages, each made one parameter when this is made.

    `connect` joins the copies on other ranks. Without it, the process holds all copies.
    """

    def __init__(
        self, manifest: Manifest, stages: Mapping[int, nn.Module], placement: Sequence[int], ranks: Collection[int]
    ) -> None:
        self._stages = stages
        shared = _share(find_ties(manifest), stages)
        self._tied = [TiedParameter(tie, parameter, placement, ranks) for tie, parameter in shared.items()]
        self._is_alone = True
        self._owned_elsewhere = {id(tied_weight.parameter) for tied_weight in self._tied if not tied_weight.is_owned}
        self._by_stage: dict[int, list[TiedParameter]] = {}  # those that several stages here have
        for weight in self._tied:
            for stage in weight.tie.stages if weight.adds_by_stage else ():
                self._by_stage.setdefault(stage, []).append(weight)

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters without those that another rank counts, so that all ranks count each weight once."""
        return [parameter for parameter in parameters if id(parameter) not in self._owned_elsewhere]

    def connect(self, world: World) -> None:
        """Make equal the copies on several ranks. Collective: every rank of the pipeline must call it."""
        self._is_alone = False
        groups: dict[tuple[int, ...], Group] = {}
        for weight in self._tied:
            ranks, tie, parameter = weight.ranks, weight.tie, weight.parameter
            if len(ranks) == 1:
                continue
            if ranks not in groups:
                groups[ranks] = world.connect(f"tie-{'-'.join(map(str, ranks))}", ranks)
            weight.group = groups[ranks]
            if not weight.group.agrees(layout_text(parameter), world.device):
                raise PipegraphError(
                    f"parallelize_fn has sharded {tie.places[0][1]} differently on the ranks that share it; here it is "
                    f"{layout_text(parameter)}. Give its copies the same placements on every stage: "
                    f"{', '.join(f'{name} of stage {stage}' for stage, name in tie.places)}."
                )
            weight.group.broadcast(local(parameter.data), weight.holders[0])

    @property
    def _summed(self) -> list[TiedParameter]:
        """Those that several stages here, or other ranks, have as well."""
        return [weight for weight in self._tied if weight.group is not None or weight.adds_by_stage]

    def replaced(self) -> tuple[int, str] | None:
        """A place of this process, (stage, name), that no longer has the tied weight of its stage; None without any."""
        for weight in self._summed:
            for index, name in weight.tie.places:
                if index in self._stages and parameter_at(self._stages[index], name) is not weight.parameter:
                    return index, name
        return None

    def add_up_together(self) -> None:
        """Add the gradients of all stages of this process up in one sum, which collectives take as it grows."""
        self._by_stage.clear()
        for weight in self._tied:
            weight.add_up_together()

    @contextmanager
    def adding(self, stage: int) -> Iterator[None]:
        """A context around a backward of a stage."""
        tied = self._by_stage.get(stage, ())
        for weight in tied:
            weight.begin(stage)
        try:
            yield
        finally:
            for weight in tied:
                weight.end(stage)

    @contextmanager
    def summed_gradients(self) -> Iterator[None]:
        """A context around a step: sums what the step adds to the gradients of tied weights.

        If the step fails in a lone process, which continues, they have what was added until then, as others have.
        """
        tied = self._summed
        previous_gradients = [tied_weight.parameter.grad for tied_weight in tied]
        for weight in tied:
            weight.parameter.grad = None
        try:
            yield
        except BaseException:
            for weight in tied if self._is_alone else ():
                weight.add_up()
            raise
        else:
            _add_up(tied)
        finally:
            for weight, old in zip(tied, previous_gradients, strict=True):
                weight.clear()
                if old is not None:
                    gradient = weight.parameter.grad
                    weight.parameter.grad = old if gradient is None else old.add_(gradient)


def _add_up(tied: Sequence[TiedParameter]) -> None:
    """Give every copy the gradients of all stages that have the weight, or none if none of them has one."""
    for weight in tied:
        weight.redistribute_gradients()
    counts = _count_gradients(tied)
    for weight in tied:
        if weight.group is None:
            weight.add_up()
            continue
        parameter, gradients = weight.parameter, weight.gradients()
        empty = torch.zeros_like(local(parameter.detach()))
        parts = [empty.clone() if part is None else local(part.detach()).contiguous() for part in gradients]
        total = _sum_in_order(parts, weight.holders, weight.group)
        # A frozen copy takes part, because those of other ranks may not be frozen.
        is_known = any(gradient is not None for gradient in gradients) or counts[parameter] > 0
        is_whole = parameter.requires_grad and is_known
        parameter.grad = rebuilt(total, parameter) if is_whole else None


def _count_gradients(tied: Sequence[TiedParameter]) -> dict[nn.Parameter, Tensor]:
    """How many ranks have a gradient of each weight that others have as well. Collective, once for each group."""
    groups: dict[Group, list[TiedParameter]] = {}
    for weight in tied:
        if weight.group is not None:
            groups.setdefault(weight.group, []).append(weight)
    counts: dict[nn.Parameter, Tensor] = {}
    for group, shared in groups.items():
        flags = [any(gradient is not None for gradient in shared_weight.gradients()) for shared_weight in shared]
        counted = torch.tensor(flags, dtype=torch.int32, device=shared[0].parameter.device)
        group.all_reduce(counted)
        counts |= zip((shared_weight.parameter for shared_weight in shared), counted, strict=True)
    return counts


def _sum_in_order(parts: Sequence[Tensor], holders: Sequence[int], group: Group) -> Tensor:
    """The sum of one tensor of each holder, in their order. Collective for the ranks of a group.

    Two are added up by an all-reduce, whose order does not matter. More are sent one after the other: what an
    all-reduce adds first depends on the element and on how many ranks there are.

    Args:
        parts: this rank's, in their order, which are used up.
        holders: the rank of each.
    """
    if len(holders) == 2:
        group.all_reduce(parts[0])
        return parts[0]
    remaining_parts, total = iter(parts), torch.empty(0)
    for place, holder in enumerate(holders):
        part = next(remaining_parts) if holder == group.rank else torch.empty_like(parts[0])
        group.broadcast(part, holder)
        total = total.add_(part) if place else part
    return total


def _share(ties: Sequence[Tie], stages: Mapping[int, nn.Module]) -> dict[Tie, nn.Parameter]:
    """Make the places of each tie among these stages one parameter, the first one's. Others are left out."""
    shared: dict[Tie, nn.Parameter] = {}
    for tie in ties:
        for stage, name in tie.places:
            if stage in stages:
                owner, attribute = owner_of(stages[stage], name)
                stage_parameter = getattr(owner, attribute)
                parameter = shared.setdefault(tie, stage_parameter)
                if layout(parameter) != layout(stage_parameter):
                    raise PipegraphError(
                        f"{name} is tied to {tie.places[0][1]}, and parallelize_fn has sharded the two differently. "
                        f"Give both the same mesh and placements."
                    )
                if parameter is not stage_parameter and (wrapper := wrapper_of(stages[stage].modules())):
                    raise PipegraphError(
                        f"{name} is tied to {tie.places[0][1]} of another stage of this rank, and {wrapper} does not "
                        "share parameters.",
                        "a schedule that gives the stages to different ranks.",
                    )
                setattr(owner, attribute, parameter)
    return shared
