"""A loop that sleeps, sends, receives and waits: what any runtime whose messages go over gloo takes at least."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipegraph.runtime.wiring import rank_pairs
from pipegraph.schedule import Action, Kind, Schedule, lower

RECEIVE_KINDS: dict[Kind, Kind] = {Kind.F: Kind.RECV_F, Kind.I: Kind.RECV_B, Kind.B: Kind.RECV_B}
"""what computes → the message that it waits for, if its stage receives one"""


def bare_step(schedule: Schedule, shape: tuple[int, ...], seconds: Callable[[Action], float]) -> Callable[[], None]:
    """Return a function that runs this rank's actions of a schedule, with sleeps in place of kernels. Collective.

    Nothing is computed or checked: all messages are sent from one tensor, and each is received into a new one. Each
    direction between two ranks has a separate group, as in pipegraph.

    Args:
        shape: of each message, in float32.
        seconds: what an action that computes sleeps for.
    """
    me, place = dist.get_rank(), schedule.placement
    lowered = lower(schedule)
    pairs = sorted(rank_pairs(lowered, range(schedule.ranks)))
    groups = {pair: dist.new_group([*pair], backend="gloo") for pair in pairs}
    peers = {pair: dist.get_group_rank(group, pair[0] + pair[1] - me) for pair, group in groups.items() if me in pair}
    sent = [torch.zeros(shape)]
    sleeps = {action: seconds(action) for action in schedule.actions[me]}
    actions = lowered.actions[me]

    def step() -> None:
        sends: list[dist.Work] = []
        received: dict[tuple[Kind, int, int], dist.Work] = {}
        for action in actions:
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            if action.peer is None:
                if kind in RECEIVE_KINDS and (work := received.pop((RECEIVE_KINDS[kind], stage, microbatch), None)):
                    work.wait()
                if sleeps[action]:
                    time.sleep(sleeps[action])
            elif action.sends:
                pair = me, place[action.peer]
                sends.append(groups[pair].send(sent, peers[pair], 0))
            else:
                pair = place[action.peer], me
                received[kind, stage, microbatch] = groups[pair].recv([torch.empty(shape)], peers[pair], 0)
        for work in sends:
            work.wait()

    return step
