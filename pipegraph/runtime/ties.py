"""Tied weights: one parameter that several stages use.

Stages of one process share one `nn.Parameter`. Across ranks every copy starts as the first stage's, and at the end of a
step the copies' gradients are summed, so that every copy holds the whole gradient and they never drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.sharded import layout, layout_text, local, wrapper_of
from pipegraph.package import Manifest
from pipegraph.runtime.processes.group import Group
from pipegraph.runtime.processes.world import World


@dataclass(frozen=True)
class Tie:
    """The names of one parameter, and where they stand: (stage, name), in the order of the stages."""

    places: tuple[tuple[int, str], ...]

    def ranks(self, placement: Sequence[int]) -> tuple[int, ...]:
        """The ranks that hold a copy, ascending."""
        return tuple(sorted({placement[stage] for stage, _ in self.places}))

    def owner(self, placement: Sequence[int]) -> int:
        """The rank of the first stage that has it."""
        return placement[self.places[0][0]]


def ties(manifest: Manifest) -> tuple[Tie, ...]:
    """Every parameter that stands in several places, under one name or several, in the order of its first place."""
    places: dict[str, list[tuple[int, str]]] = {}
    for stage in manifest.stages:
        for name in stage.parameters:
            places.setdefault(manifest.stored_name(name), []).append((stage.index, name))
    return tuple(Tie(tuple(found)) for found in places.values() if len(found) > 1)


def share(tied: Sequence[Tie], stages: Mapping[int, nn.Module]) -> dict[Tie, nn.Parameter]:
    """Make the places of each tie among these stages one parameter, the first one's. Those without one are left out."""
    shared: dict[Tie, nn.Parameter] = {}
    for tie in tied:
        for stage, name in tie.places:
            if stage in stages:
                module, _, attribute = name.rpartition(".")
                owner = stages[stage].get_submodule(module)
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


class RemoteTies:
    """Those ties whose copies are on several ranks, this one among them. Made by all ranks together."""

    def __init__(self, shared: Mapping[Tie, nn.Parameter], placement: Sequence[int], world: World) -> None:
        groups: dict[tuple[int, ...], Group] = {}
        self._copies: list[tuple[nn.Parameter, Group]] = []
        for tie, parameter in shared.items():
            ranks = tie.ranks(placement)
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
            groups[ranks].broadcast(local(parameter.data), tie.owner(placement))
            self._copies.append((parameter, groups[ranks]))

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Around a step: what the step adds to a copy's gradient is summed over the copies, and nothing else is."""
        before = [parameter.grad for parameter, _ in self._copies]
        for parameter, _ in self._copies:
            parameter.grad = None
        try:
            yield
            for parameter, group in self._copies:
                # Frozen copies take part with zeros, as other ranks may not have frozen theirs.
                total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                group.all_reduce(local(total.detach()))
                parameter.grad = total.detach() if parameter.requires_grad else None
        finally:
            for (parameter, _), old in zip(self._copies, before, strict=True):
                if old is not None:
                    parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
