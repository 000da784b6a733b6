"""Tied weights: one parameter that several stages use.

Stages of one process share one `nn.Parameter`. Across ranks every copy starts as the first stage's. At the end of a
step the copies' gradients are summed, so that every copy holds the whole gradient and the copies never drift apart.

The gradient of each stage is added up by itself, and then those of the stages, also within one process: the sum of two
stages is the same to the last digit wherever they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.sharded import layout, layout_text, local, wrapper_of
from pipegraph.package import Manifest
from pipegraph.runtime.parameters import owner_of
from pipegraph.runtime.processes.group import Group
from pipegraph.runtime.processes.world import World


@dataclass(frozen=True)
class Tie:
    """The places of one parameter: (stage, name), in the order of the stages."""

    places: tuple[tuple[int, str], ...]

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
    return tuple(Tie(tuple(each)) for each in places.values() if len(each) > 1)


class TiedWeights:
    """The tied weights of this process's stages, each made one parameter when this is made.

    `connect` joins the copies on other ranks. Without it, the process holds all copies.
    """

    def __init__(
        self, manifest: Manifest, stages: Mapping[int, nn.Module], placement: Sequence[int], ranks: Collection[int]
    ) -> None:
        self._placement = placement
        self._parameters = _share(find_ties(manifest), stages)
        self._owned_elsewhere = {
            id(parameter) for tie, parameter in self._parameters.items() if tie.owner(placement) not in ranks
        }
        self._copies: list[tuple[nn.Parameter, Group]] = []
        self._by_stage: dict[int, list[nn.Parameter]] = {}  # those that several stages here have
        for tie, parameter in self._parameters.items():
            here = dict.fromkeys(stage for stage, _ in tie.places if stage in stages)
            for stage in here if len(here) > 1 else ():
                self._by_stage.setdefault(stage, []).append(parameter)
        self._sums: dict[tuple[int, int], torch.Tensor | None] = {}  # by parameter and stage

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters without those that another rank counts, so that all ranks count each weight once."""
        return [parameter for parameter in parameters if id(parameter) not in self._owned_elsewhere]

    def connect(self, world: World) -> None:
        """Make equal the copies on several ranks. Collective: every rank of the pipeline must call it."""
        groups: dict[tuple[int, ...], Group] = {}
        for tie, parameter in self._parameters.items():
            ranks = tie.ranks(self._placement)
            if len(ranks) == 1:
                continue
            if ranks not in groups:
                groups[ranks] = world.connect(f"tie-{'-'.join(map(str, ranks))}", ranks)
            if not groups[ranks].agrees(layout_text(parameter), world.device):
                raise PipegraphError(
                    f"parallelize_fn has sharded {tie.places[0][1]} differently on the ranks that share it; here it is "
                    f"{layout_text(parameter)}. Give its copies the same placements on every stage: "
                    f"{', '.join(f'{name} of stage {stage}' for stage, name in tie.places)}."
                )
            groups[ranks].broadcast(local(parameter.data), tie.owner(self._placement))
            self._copies.append((parameter, groups[ranks]))

    def add_up_together(self) -> None:
        """Add the gradients of all stages of this process up in one sum, which collectives take as it grows."""
        self._by_stage.clear()

    @contextmanager
    def adding(self, stage: int) -> Iterator[None]:
        """A context around a backward of a stage."""
        parameters = self._by_stage.get(stage, ())
        for parameter in parameters:
            parameter.grad = self._sums.pop((id(parameter), stage), None)
        yield
        for parameter in parameters:
            self._sums[id(parameter), stage], parameter.grad = parameter.grad, None

    @contextmanager
    def summed_gradients(self) -> Iterator[None]:
        """A context around a step: sums what the step adds to the gradients of tied weights."""
        of_stages = [parameter for parameters in self._by_stage.values() for parameter in parameters]
        held = list(dict.fromkeys([*(parameter for parameter, _ in self._copies), *of_stages]))
        before = [parameter.grad for parameter in held]
        for parameter in held:
            parameter.grad = None
        self._sums.clear()
        try:
            yield
            for stage in sorted(self._by_stage):
                for parameter in self._by_stage[stage]:
                    own = self._sums.pop((id(parameter), stage), None)
                    if own is not None:
                        parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
            for parameter, group in self._copies:
                # A frozen copy takes part with zeros, because other ranks may not have frozen theirs.
                total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                group.all_reduce(local(total.detach()))
                parameter.grad = total.detach() if parameter.requires_grad else None
        finally:
            for parameter, old in zip(held, before, strict=True):
                if old is not None:
                    parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)


def _share(ties: Sequence[Tie], stages: Mapping[int, nn.Module]) -> dict[Tie, nn.Parameter]:
    """Make the places of each tie among these stages one parameter, the first one's. Others are left out."""
    shared: dict[Tie, nn.Parameter] = {}
    for tie in ties:
        for stage, name in tie.places:
            if stage in stages:
                owner, attribute = owner_of(stages[stage], name)
                own = getattr(owner, attribute)
                parameter = shared.setdefault(tie, own)
                if layout(parameter) != layout(own):
                    raise PipegraphError(
                        f"{name} is tied to {tie.places[0][1]}, and parallelize_fn has sharded the two differently. "
                        f"Give both the same mesh and placements."
                    )
                if parameter is not own and (wrapper := wrapper_of(stages[stage].modules())):
                    raise PipegraphError(
                        f"{name} is tied to {tie.places[0][1]} of another stage of this rank, and {wrapper} does not "
                        f"share parameters. Try: a schedule that gives the stages to different ranks."
                    )
                setattr(owner, attribute, parameter)
    return shared
