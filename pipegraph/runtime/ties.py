"""Tied weights: one parameter that several stages use.

Stages of one process share one `nn.Parameter`. Across ranks every copy starts as the first stage's. At the end of a
step the copies' gradients are summed, so that every copy holds the whole gradient and the copies never drift apart.

Gradients are first summed within each stage and then over the stages in order, also within one process: the sum is
bitwise equal for every placement of the stages.

rank 0: stages 0, 3 ─ g0, g3 ─┐
rank 1: stages 1, 2 ─ g1, g2 ─┴─▶ ((g0 + g1) + g2) + g3 on both
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.sharded import layout, layout_text, local, rebuilt, wrapper_of
from pipegraph.package import Manifest
from pipegraph.runtime.parameters import owner_of, parameter_at, redistribute
from pipegraph.runtime.processes.group import Group
from pipegraph.runtime.processes.world import World


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
                        f"share parameters. Try: a schedule that gives the stages to different ranks."
                    )
                setattr(owner, attribute, parameter)
    return shared
