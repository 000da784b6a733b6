"""Paths through a schedule that turn on one stage alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.prefix_sums import FORWARD, INPUT_GRAD, WEIGHT_GRAD
from pipegraph.schedule import Kind, Schedule

PARTS = {Kind.F: (FORWARD,), Kind.I: (INPUT_GRAD,), Kind.W: (WEIGHT_GRAD,), Kind.B: (INPUT_GRAD, WEIGHT_GRAD)}
"""What the actions that compute are made of."""

Order = Sequence[tuple[Kind, int]]
"""Kind and microbatch of the actions of one stage."""


class Walk(NamedTuple):
    """A path that comes from the first stage to a stage, does the actions of that one, and goes on.

    Attributes:
        forward, input_grad, weight_grad: how many F, I and W of the stage it passes; a B is an I and a W.
        turns: how often it goes from an F on to the last stage and back to the I or B of the same microbatch, past all
            that the stage does between.
        returns: whether it then goes back to the first stage.
        leaves: whether it then goes on to the last stage.
    """

    forward: int
    input_grad: int
    weight_grad: int
    turns: int
    returns: bool
    leaves: bool


def walks(schedule: Schedule) -> list[list[Walk]]:
    """Of each stage, the paths that may be the longest of those that turn on it alone."""
    orders: list[list[tuple[Kind, int]]] = [[] for _ in range(schedule.stages)]
    for row in schedule.actions:
        for action in row:
            orders[action.stage].append((action.kind, action.microbatch))
    return [_longest(list(_walks(order))) if schedule.trains else [_forward(order)] for order in orders]


def _forward(order: Order) -> Walk:
    return Walk(len(order), 0, 0, 0, returns=False, leaves=True)


def _walks(order: Order) -> Iterator[Walk]:
    """Paths that turn at the first F, at the last, at each they meet, or never; to the end, or to the last I or B and
    back from there."""
    back = {microbatch: at for at, (kind, microbatch) in enumerate(order) if kind in (Kind.I, Kind.B)}
    forwards = [microbatch for kind, microbatch in order if kind is Kind.F]
    for turning in ((), forwards[:1], forwards[-1:], forwards):
        for end, returns in ((len(order), False), (max(back.values()) + 1, True)):
            passed, turns, at = [0, 0, 0], 0, 0
            while at < end:
                kind, microbatch = order[at]
                for part in PARTS[kind]:
                    passed[part] += 1
                turn = kind is Kind.F and microbatch in turning
                turns += turn
                at = back[microbatch] if turn else at + 1
            yield Walk(passed[0], passed[1], passed[2], turns, returns, leaves=False)


def _longest(found: Sequence[Walk]) -> list[Walk]:
    """Those of which no other passes as much of everything."""
    every = np.unique(np.array(found, np.int64), axis=0)
    covered = (every[:, None] <= every).all(axis=2) & ~np.eye(len(every), dtype=bool)
    return [Walk(*row) for row in every[~covered.any(axis=1)].tolist()]
