"""The actions of a schedule as arrays of integers, for passes over many actions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.stages import Dependencies, Edge

Integers = NDArray[np.int64]

KINDS = tuple(Kind)
CODES: dict[Kind, int] = {kind: code for code, kind in enumerate(KINDS)}
F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B = range(len(KINDS))  # noqa: E741 - the field's letter

# The kind of result that each kind of action makes. I and B make the same: the gradients of their stage's inputs.
_RESULT = np.array([0, 1, 2, 1, 3, 4, 5, 6])
_PER_STAGE = 3


@dataclass(frozen=True, eq=False)
class ActionArrays:
    """The actions of any schedule, sound or not, numbered rank after rank, each rank's in order.

    Every array holds one figure per action unless it says otherwise.
    """

    actions: Sequence[Sequence[Action]]
    dependencies: Dependencies
    overlapped: Collection[tuple[Action, Action]] = ()

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The number of each rank's first action, and at the end the number of all actions."""
        return tuple(accumulate(map(len, self.actions), initial=0))

    @property
    def count(self) -> int:
        return self.bounds[-1]

    @cached_property
    def rank(self) -> Integers:
        return np.repeat(np.arange(len(self.actions)), [len(row) for row in self.actions])

    @cached_property
    def stage(self) -> Integers:
        return self._integers(action.stage for action in self.flat())

    @cached_property
    def kind(self) -> Integers:
        """F, I, W, B and so on of this module."""
        return self._integers(CODES[action.kind] for action in self.flat())

    @cached_property
    def microbatch(self) -> Integers:
        return self._integers(action.microbatch for action in self.flat())

    @cached_property
    def peer(self) -> Integers:
        """The stage at a transfer's other end; −1 for an action that computes."""
        return self._integers(-1 if action.peer is None else action.peer for action in self.flat())

    @cached_property
    def edges(self) -> Integers:
        """(producer, consumer) of each edge, sorted: (edges, 2)."""
        return _pairs(sorted(self.dependencies.edges))

    @cached_property
    def crosses(self) -> NDArray[np.bool_]:
        """Whether the values of each edge are transferred: (edges,)."""
        placement = np.array(self.dependencies.placement)
        return placement[self.edges[:, 0]] != placement[self.edges[:, 1]]

    @cached_property
    def returns(self) -> NDArray[np.bool_]:
        """Whether a gradient returns over each edge: (edges,)."""
        return np.isin(self._edge_keys(*self.edges.T), self._edge_keys(*_pairs(self.dependencies.gradient_edges).T))

    @cached_property
    def edge(self) -> Integers:
        """The number of a transfer's edge; −1 if the schedule has no such edge, and for an action that computes."""
        numbers = KeyIndex(self._edge_keys(*self.edges.T)).find(self._transfer_keys)
        return np.where((self.peer < 0) | (numbers == len(self.edges)), -1, numbers)

    def flat(self) -> Iterator[Action]:
        return chain.from_iterable(self.actions)

    def place(self, number: int) -> tuple[int, int]:
        """Return an action's rank, and its position there."""
        rank = int(self.rank[number])
        return rank, number - self.bounds[rank]

    def action(self, number: int) -> Action:
        rank, position = self.place(number)
        return self.actions[rank][position]

    def numbers(self, actions: Iterable[Action]) -> Integers:
        """Return the numbers of these actions, all of which compute; ``count`` for one that is missing."""
        triples = [(CODES[action.kind], action.stage, action.microbatch) for action in actions]
        kind, stage, microbatch = np.array(triples, np.int64).reshape(-1, 3).T
        in_range = (stage < self._stages) & (microbatch < self._width)
        key = self._key(_RESULT[kind] * self._stages + stage, microbatch)
        candidates = self.index.find(np.where(in_range, key, -1))
        same_kind = np.append(self.kind, -1)[candidates] == kind
        return np.where(in_range & same_kind, candidates, self.count)

    def forwards_of(self, numbers: Integers) -> Integers:
        """Return for each of these actions the F of its stage and microbatch."""
        return self.index.find(self._key(self.stage[numbers], self.microbatch[numbers]))

    def join(self, actions: Integers, stages: Integers, values: Integers) -> tuple[Integers, Integers]:
        """Pair each of these actions with each of the ``values`` whose entry in ``stages`` is the action's stage."""
        order = np.argsort(stages, kind="stable")
        counts = np.bincount(stages, minlength=self._stages)[self.stage[actions]]
        begins = np.searchsorted(stages[order], self.stage[actions])
        action_index = np.repeat(np.arange(len(actions)), counts)
        nth = np.arange(len(action_index)) - np.repeat(np.cumsum(counts) - counts, counts)
        return actions[action_index], values[order][begins[action_index] + nth]

    @cached_property
    def results(self) -> Integers:
        """A number for what each action makes, the same for two that make the same.

        −1 for an action of an unknown stage or edge.
        """
        transfer = self.peer >= 0
        kind = np.where(
            transfer,
            _PER_STAGE * self._stages + (self.kind - SEND_F) * len(self.edges) + self.edge,
            _RESULT[self.kind] * self._stages + self.stage,
        )
        unknown = np.where(transfer, self.edge < 0, self.stage >= self._stages)
        return np.where(unknown, -1, self._key(kind, self.microbatch))

    @cached_property
    def index(self) -> KeyIndex:
        """Finds the action that makes a result; of several, the first on the stage's own rank."""
        holder = np.array(self.dependencies.placement)[np.minimum(self.stage, self._stages - 1)]
        return KeyIndex(self.results, misplaced=holder != self.rank)

    @cached_property
    def needs(self) -> tuple[Integers, Integers]:
        """Every result that an action waits for, as (action, the action that makes it), sorted by the first.

        The number ``count`` means that no action makes the result. An action of an unknown stage needs nothing.
        """
        pairs = [*self._own_needs(), *self._needs_of_others()]
        action = np.concatenate([first for first, _ in pairs])
        maker = self.index.find(np.concatenate([second for _, second in pairs]))
        order = np.argsort(action, kind="stable")
        return action[order], maker[order]

    @cached_property
    def pairs(self) -> Integers:
        """The forwards of all overlapped pairs whose backward is the next action: (pairs,)."""
        forward, backward = self.numbers(f for f, _ in self.overlapped), self.numbers(b for _, b in self.overlapped)
        rank = np.append(self.rank, -1)
        together = (forward + 1 == backward) & (rank[forward] == rank[backward])
        return np.sort(forward[together])

    def _own_needs(self) -> Iterator[tuple[Integers, Integers]]:
        """Yield what actions need of their own stage, and transfers of their partner."""
        stages, edges = self._stages, len(self.edges)
        of_forward = self._actions_of(I, B, SEND_F)
        yield of_forward, self._key(self.stage[of_forward], self.microbatch[of_forward])
        of_backward = self._actions_of(W, SEND_B)
        yield of_backward, self._key(stages + self.stage[of_backward], self.microbatch[of_backward])
        transfers = np.flatnonzero(self.edge >= 0)
        partner = (self.kind[transfers] - SEND_F) ^ 1
        row = _PER_STAGE * stages + partner * edges + self.edge[transfers]
        yield transfers, self._key(row, self.microbatch[transfers])

    def _needs_of_others(self) -> Iterator[tuple[Integers, Integers]]:
        """Yield what F needs of earlier stages, and B or I of later ones."""
        producer, consumer = self.edges.T
        received = self.crosses & self.dependencies.lowered
        first = _PER_STAGE * self._stages
        numbers = np.arange(len(self.edges))
        forward = np.where(received, first + (RECV_F - SEND_F) * len(self.edges) + numbers, producer)
        backward = np.where(received, first + (RECV_B - SEND_F) * len(self.edges) + numbers, self._stages + consumer)
        back = self.returns
        waiting = (self._actions_of(F), consumer, forward), (self._actions_of(B, I), producer[back], backward[back])
        for actions, stage, row in waiting:
            action, result_row = self.join(actions, stage, row)
            yield action, self._key(result_row, self.microbatch[action])

    def _actions_of(self, *kinds: int) -> Integers:
        """Return all actions of these kinds whose result has a number."""
        return np.flatnonzero(np.isin(self.kind, kinds) & (self.results >= 0))

    @property
    def _stages(self) -> int:
        return len(self.dependencies.placement)

    @cached_property
    def _width(self) -> int:
        return 1 + int(self.microbatch.max(initial=0))

    def _key(self, row: Integers, microbatch: Integers) -> Integers:
        return row * self._width + microbatch

    def _edge_keys(self, producer: Integers, consumer: Integers) -> Integers:
        return producer * self._stages + consumer

    @cached_property
    def _transfer_keys(self) -> Integers:
        low, high = np.minimum(self.stage, self.peer), np.maximum(self.stage, self.peer)
        return np.where((low >= 0) & (high < self._stages), self._edge_keys(low, high), -1)

    def _integers(self, values: Iterable[int]) -> Integers:
        return np.fromiter(values, np.int64, self.count)


class KeyIndex:
    """Finds keys in an array. −1 is not a key. A ``misplaced`` key is found only if there is no other."""

    def __init__(self, keys: Integers, misplaced: NDArray[np.bool_] | None = None) -> None:
        if misplaced is None or not misplaced.any():
            self.order = np.argsort(keys, kind="stable")
        else:
            self.order = np.lexsort((misplaced, keys))
        self.keys = keys[self.order]

    def find(self, keys: Integers) -> Integers:
        """Return the first position of each wanted key; the number of keys if it is missing."""
        at = np.searchsorted(self.keys, keys)
        hit = (np.append(self.keys, -1)[at] == keys) & (keys >= 0)
        return np.where(hit, np.append(self.order, 0)[at], len(self.keys))

    def repeated(self) -> Integers:
        """Return the positions of keys that have an earlier equal."""
        again = (self.keys[1:] == self.keys[:-1]) & (self.keys[1:] >= 0)
        return self.order[1:][again]


def _pairs(edges: Sequence[Edge]) -> Integers:
    return np.array(edges, np.int64).reshape(-1, 2)
