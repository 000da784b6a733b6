"""What each action of a schedule waits for, and what it gives to the actions that wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pipegraph.schedule.action import Action, Kind

Edge = tuple[int, int]
"""(producer stage, consumer stage): values of the first are inputs of the second, a later one."""

Token = tuple[Kind, int, int, int]
"""(kind, stage, microbatch, peer or −1): one thing that is given and waited for."""

Grouped = dict[int, tuple[int, ...]]


def chain(stages: int) -> tuple[Edge, ...]:
    """The edges of a plain pipeline: each stage feeds the next."""
    return tuple((stage, stage + 1) for stage in range(stages - 1))


@dataclass(frozen=True)
class Dependencies:
    """Which action waits for which.

    ``lowered`` says that the schedule has transfers: a value from another rank is then there once it is received,
    and otherwise as soon as the other rank has made it.

    An action that computes gives its token when it ends; I gives the same as B, the gradient of the stage's inputs.
    A transfer gives its token when its rank arrives at it, and waits for its partner's: a blocking rendezvous.
    """

    placement: tuple[int, ...]
    edges: tuple[Edge, ...]
    gradient_edges: tuple[Edge, ...]
    lowered: bool

    @cached_property
    def producers(self) -> Grouped:
        """Of each stage, the stages whose values it uses."""
        return _grouped((consumer, producer) for producer, consumer in self.edges)

    @cached_property
    def consumers(self) -> Grouped:
        """Of each stage, the stages that use its values."""
        return _grouped(self.edges)

    @cached_property
    def gradient_producers(self) -> Grouped:
        """Of each stage, the stages to which it gives back a gradient."""
        return _grouped((consumer, producer) for producer, consumer in self.gradient_edges)

    @cached_property
    def gradient_consumers(self) -> Grouped:
        """Of each stage, the stages that give a gradient back to it."""
        return _grouped(self.gradient_edges)

    def gives(self, action: Action) -> Token:
        kind = Kind.B if action.kind is Kind.I else action.kind
        return (kind, action.stage, action.microbatch, -1 if action.peer is None else action.peer)

    def needs(self, action: Action) -> list[Token]:
        """What must be given before the action can run, its own stage's first."""
        kind, stage, microbatch, peer = action.kind, action.stage, action.microbatch, action.peer
        if kind is Kind.F:
            return [self._value(Kind.RECV_F, stage, microbatch, other) for other in self.producers.get(stage, ())]
        if kind is Kind.B or kind is Kind.I:
            consumers = self.gradient_consumers.get(stage, ())
            gradients = [self._value(Kind.RECV_B, stage, microbatch, other) for other in consumers]
            return [(Kind.F, stage, microbatch, -1), *gradients]
        if kind is Kind.W or peer is None:
            return [(Kind.B, stage, microbatch, -1)]
        if kind is Kind.SEND_F:
            return [(Kind.F, stage, microbatch, -1), (Kind.RECV_F, peer, microbatch, stage)]
        if kind is Kind.SEND_B:
            return [(Kind.B, stage, microbatch, -1), (Kind.RECV_B, peer, microbatch, stage)]
        return [(Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B, peer, microbatch, stage)]

    def crosses(self, edge: Edge) -> bool:
        """Whether the edge's stages are on different ranks, so that its values must be transferred."""
        return self.placement[edge[0]] != self.placement[edge[1]]

    def _value(self, receive: Kind, stage: int, microbatch: int, other: int) -> Token:
        """What makes a value (or gradient) of another stage available to this one."""
        if self.lowered and self.placement[stage] != self.placement[other]:
            return (receive, stage, microbatch, other)
        return (Kind.F if receive is Kind.RECV_F else Kind.B, other, microbatch, -1)


def _grouped(pairs: Iterable[Edge]) -> Grouped:
    groups: dict[int, tuple[int, ...]] = {}
    for first, second in sorted(pairs):
        groups[first] = (*groups.get(first, ()), second)
    return groups
