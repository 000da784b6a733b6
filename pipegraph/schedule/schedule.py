"""A schedule: what each rank does, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain as chained
from typing import Any

from pipegraph.arguments import require_type
from pipegraph.errors import ScheduleError
from pipegraph.notebook import draw
from pipegraph.schedule.action import BACKWARD, Action, Collective, CollectiveKind, Kind
from pipegraph.schedule.action_arrays import ActionArrays
from pipegraph.schedule.replay import grid, slots
from pipegraph.schedule.stages import Dependencies, Edge, chain


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of every rank in the order in which it does them. ``str`` draws them over time.

    The constructor checks that the fields fit together and raises ScheduleError if they do not; `check` decides whether
    the actions can run.
    """

    name: str
    placement: tuple[int, ...]
    """stage → rank"""
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    """rank → its actions, in order"""
    overlapped: frozenset[tuple[Action, Action]] = frozenset()
    """pairs (F, B) of one rank that are meant to run at the same time"""
    edges: tuple[Edge, ...] | None = None
    """(producer stage, consumer stage) pairs that carry values; None: the chain, and the edges of the transfers"""
    gradient_edges: tuple[Edge, ...] | None = None
    """the edges over which a gradient returns; None: all"""
    collectives: tuple[Collective, ...] = ()
    """what `lower` places, or a text has, for sharded and replicated stages: each rank's in their order"""

    def __post_init__(self) -> None:
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise ScheduleError(f"A schedule has 1 microbatch or more, not {self.microbatches!r}.")
        self._set("placement", _tuple("placement", self.placement))
        self._set("actions", tuple(_tuple("actions of a rank", row) for row in _tuple("actions", self.actions)))
        for item in (item for row in self.actions for item in row if type(item) is not Action):
            raise ScheduleError(f"The actions of a schedule are of the class Action, not {item!r}.")
        if not self.actions:
            raise ScheduleError("A schedule has 1 rank or more: give the actions of each.")
        if not all(type(rank) is int for rank in self.placement) or {*self.placement} != {*range(self.ranks)}:
            raise ScheduleError(
                f"The placement {self.placement} does not fit the actions of {self.ranks} ranks: "
                f"it gives the rank of each stage, and every rank from 0 to {self.ranks - 1} holds one or more."
            )
        self._set("overlapped", frozenset(_pair(pair) for pair in _tuple("overlapped pairs", self.overlapped)))
        if self.edges is not None:
            self._set("edges", _edges(self.edges, self.stages))
            back = self.edges if self.gradient_edges is None else _edges(self.gradient_edges, self.stages)
            self._set("gradient_edges", back)
            if unknown := sorted({*back} - {*self.edges}):
                raise ScheduleError(
                    f"A gradient cannot return over {unknown[0]}: that is not one of the edges {self.edges}."
                )
        elif self.gradient_edges is not None:
            raise ScheduleError("gradient_edges are some of the edges: give edges too.")
        if self.collectives:
            self._set("collectives", _collectives(self.collectives, self.placement, self.actions))

    def __hash__(self) -> int:
        return hash((self.name, self.placement, self.microbatches))  # not the many actions

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def trains(self) -> bool:
        """Whether the actions include a backward."""
        return any(action.kind in BACKWARD for row in self.actions for action in row)

    @cached_property
    def lowered(self) -> bool:
        """Whether the actions include transfers."""
        return any(action.peer is not None for row in self.actions for action in row)

    @cached_property
    def dependencies(self) -> Dependencies:
        """The stages that actions wait for."""
        if self.edges is not None and self.gradient_edges is not None:
            return Dependencies(self.placement, self.edges, self.gradient_edges, self.lowered)
        edges, gradient_edges = set(chain(self.stages)), set(chain(self.stages))
        transfers = {(a.stage, a.peer, a.kind) for row in self.actions for a in row if a.peer is not None}
        for stage, peer, kind in transfers:
            edge = (min(stage, peer), max(stage, peer))
            if edge[1] < self.stages:
                edges.add(edge)
                if kind is Kind.SEND_B or kind is Kind.RECV_B:
                    gradient_edges.add(edge)
        return Dependencies(self.placement, tuple(sorted(edges)), tuple(sorted(gradient_edges)), self.lowered)

    @cached_property
    def arrays(self) -> ActionArrays:
        """The actions as arrays of integers, for passes over all of them."""
        return ActionArrays(self.actions, self.dependencies, self.overlapped)

    def changed(self, **changes: Any) -> Schedule:
        """Return a plain Schedule with some fields changed. What a subclass adds does not hold for other actions.

        A collective whose action is gone comes before the next one of its rank that is left.
        """
        field_values = {field.name: getattr(self, field.name) for field in fields(Schedule)}
        if self.collectives and "actions" in changes:
            changes = {"collectives": self._moved_collectives(changes["actions"]), **changes}
        return Schedule(**field_values | changes)

    def _moved_collectives(self, rows: Sequence[Sequence[Action]]) -> tuple[Collective, ...]:
        following: dict[Action, Action | None] = {}
        for old_row, new_row in zip(self.actions, rows, strict=False):
            remaining_actions, next_left = {*new_row}, None
            for action in reversed(old_row):
                next_left = action if action in remaining_actions else next_left
                following[action] = next_left
        return tuple(
            collective if collective.before is None else replace(collective, before=following.get(collective.before))
            for collective in self.collectives
        )

    def units(self, rank: int) -> Iterator[tuple[Action, ...]]:
        """Yield what a rank does one after the other: an action, or two adjacent ones that are an overlapped pair."""
        row = self.actions[rank]
        if not self.overlapped:
            yield from zip(row)
            return
        position = 0
        while position < len(row):
            pair = row[position : position + 2]
            unit = pair if pair in self.overlapped else pair[:1]
            yield unit
            position += len(unit)

    def program(self, rank: int) -> tuple[Action | Collective, ...]:
        """Return all that a rank does, in order: its actions, and its collectives between them."""
        if not self.collectives:
            return self.actions[rank]
        units = self.program_units(rank)
        return tuple(chained.from_iterable((unit,) if isinstance(unit, Collective) else unit for unit in units))

    def program_units(self, rank: int) -> Iterator[Collective | tuple[Action, ...]]:
        """Yield the collectives and units of a rank, in order.

        What comes before the second action of a unit comes before the whole unit, because that begins at once.
        """
        collectives = self._collectives_before[rank]
        for unit in self.units(rank):
            if collectives:
                for action in unit:
                    yield from collectives.get(action, ())
            yield unit
        yield from collectives.get(None, ())

    @cached_property
    def _collectives_before(self) -> list[dict[Action | None, list[Collective]]]:
        """rank → {action: the collectives right before it}; None: after all actions"""
        by_rank: list[dict[Action | None, list[Collective]]] = [{} for _ in self.actions]
        for collective in self.collectives:
            by_rank[self.placement[collective.stage]].setdefault(collective.before, []).append(collective)
        return by_rank

    @cached_property
    def sharded(self) -> frozenset[int]:
        """The stages whose parameters are gathered in it."""
        return frozenset(
            collective.stage for collective in self.collectives if collective.kind is not CollectiveKind.REDUCE_GRAD
        )

    @cached_property
    def reduced(self) -> frozenset[int]:
        """The stages whose gradients are reduced in it."""
        return frozenset(
            collective.stage for collective in self.collectives if collective.kind is CollectiveKind.REDUCE_GRAD
        )

    @cached_property
    def gathers(self) -> tuple[int, ...]:
        """rank → how often it gathers the parameters of a stage in a step"""
        return self._count(CollectiveKind.UNSHARD)

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """rank → how often it reduces the gradients of a stage in a step"""
        return self._count(CollectiveKind.REDUCE_GRAD)

    def _count(self, kind: CollectiveKind) -> tuple[int, ...]:
        counts = [0] * self.ranks
        for collective in self.collectives:
            counts[self.placement[collective.stage]] += collective.kind is kind
        return tuple(counts)

    def cells(self) -> list[list[str]]:
        """Return the text of each action, for a grid: after the collectives that come right before it."""
        rows = []
        for row, collectives in zip(self.actions, self._collectives_before, strict=True):
            texts = [" ".join(map(str, (*collectives.get(action, ()), action))) for action in row]
            texts[-1:] = [" ".join((text, *map(str, collectives.get(None, ())))) for text in texts[-1:]]
            rows.append(texts)
        return rows

    def __str__(self) -> str:
        sizes = f"{self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches"
        return f"{self.name}: {sizes}\n{grid(self.cells(), slots(self.arrays))}"

    __repr__ = __str__

    def _repr_svg_(self) -> str | None:
        return draw("schedule_svg", self)

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)  # the dataclass is frozen to everyone else


def require_schedule(function: str, schedule: object) -> None:
    """Raise ScheduleError unless a function is given a Schedule."""
    examples = 'build("1f1b", ranks=4, microbatches=8), or from_csv(text)'
    require_type(schedule, Schedule, f"{function}() takes a Schedule", examples, ScheduleError)


def _tuple(subject: str, items: Iterable[Any]) -> tuple[Any, ...]:
    try:
        return tuple(items)
    except TypeError:
        raise ScheduleError(f"The {subject} of a schedule are a sequence, not {items!r}.") from None


def _pair(pair: object) -> tuple[Action, Action]:
    match pair:
        case (Action(kind=Kind.F) as forward, Action(kind=Kind.B) as backward):
            return (forward, backward)
    raise ScheduleError(f"An overlapped pair is an F and a B, not {pair!r}.")


def _collectives(
    collectives: Iterable[object], placement: Sequence[int], rows: Sequence[Sequence[Action]]
) -> tuple[Collective, ...]:
    """Return the collectives. Raises ScheduleError if one is not before an action of its stage's rank."""
    checked_collectives, rank_actions = [], [{*row} for row in rows]
    for collective in _tuple("collectives", collectives):
        if not isinstance(collective, Collective) or not 0 <= collective.stage < len(placement):
            raise ScheduleError(f"A collective is of one of the stages 0 to {len(placement) - 1}, not {collective!r}.")
        if collective.before is not None and collective.before not in rank_actions[placement[collective.stage]]:
            rank = placement[collective.stage]
            raise ScheduleError(
                f"{collective} cannot be before {collective.before}, which rank {rank}, its own, does not have."
            )
        checked_collectives.append(collective)
    return tuple(checked_collectives)


def _edges(edges: Iterable[object], stages: int) -> tuple[Edge, ...]:
    """Sort the edges, each once. Raises ScheduleError if one does not lead from a stage to a later one."""
    distinct_edges = set()
    for edge in _tuple("edges", edges):
        match edge:
            case (int(producer), int(consumer)) if 0 <= producer < consumer < stages:
                distinct_edges.add((producer, consumer))
            case _:
                raise ScheduleError(
                    f"{edge!r} is not an edge: an edge leads from one of the stages 0 to {stages - 1} to a later one, "
                    f"such as (0, 1)."
                )
    return tuple(sorted(distinct_edges))
