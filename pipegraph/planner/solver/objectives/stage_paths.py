"""Paths through a schedule that stay on one stage, for a lower bound from that stage alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.prefix_sums import FORWARD, INPUT_GRAD, WEIGHT_GRAD
from pipegraph.schedule import Kind, Schedule

PARTS = {Kind.F: (FORWARD,), Kind.I: (INPUT_GRAD,), Kind.W: (WEIGHT_GRAD,), Kind.B: (INPUT_GRAD, WEIGHT_GRAD)}
"""kind of action → the quantities that its time is the sum of"""

Order = Sequence[tuple[Kind, int]]
"""(kind, microbatch) of the actions of one stage"""


class StagePath(NamedTuple):
    """A path from the first stage to a stage, through actions of that stage, and on.

    Attributes:
        forward, input_grad, weight_grad: how many F, I and W of the stage it contains; a B is an I and a W.
        turns: how often it goes from an F to the last stage and back to the I or B of the same microbatch, without the
            actions of the stage between these two.
        returns: whether it goes back to the first stage at the end.
        leaves: whether it goes on to the last stage at the end.
    """

    forward: int
    input_grad: int
    weight_grad: int
    turns: int
    returns: bool
    leaves: bool


def stage_paths(schedule: Schedule) -> list[list[StagePath]]:
    """Return for each stage the paths that may be the longest, whatever the times are."""
    orders: list[list[tuple[Kind, int]]] = [[] for _ in range(schedule.stages)]
    for row in schedule.actions:
        for action in row:
            orders[action.stage].append((action.kind, action.microbatch))
    return [_not_dominated(list(_paths(order))) if schedule.trains else [_forward_path(order)] for order in orders]


def _forward_path(order: Order) -> StagePath:
    return StagePath(len(order), 0, 0, 0, returns=False, leaves=True)


def _paths(order: Order) -> Iterator[StagePath]:
    """Yield paths that turn at the first F, at the last, at each that they reach, or never.

    They go to the last action, or to the last I or B and back to the first stage.
    """
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
            yield StagePath(passed[0], passed[1], passed[2], turns, returns, leaves=False)


def _not_dominated(paths: Sequence[StagePath]) -> list[StagePath]:
    """Return the paths of which no other contains as much of everything."""
    every = np.unique(np.array(paths, np.int64), axis=0)
    covered = (every[:, None] <= every).all(axis=2) & ~np.eye(len(every), dtype=bool)
    return [StagePath(*row) for row in every[~covered.any(axis=1)].tolist()]
