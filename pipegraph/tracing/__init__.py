"""Runs of a pipeline recorded as traces: written, read, merged and analysed. What it finds is presented by `report`.

What is written and read: names of actions, `F stage 1 microbatch 3`, `SEND_F stage 0 microbatch 3 to stage 1`, and of
collectives, `UNSHARD stage 0`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from pipegraph.schedule import Action, Collective, CollectiveKind, Kind

_NAME = re.compile(rf"({'|'.join(Kind)}) stage (\d{{1,9}}) microbatch (\d{{1,9}})(?: (to|from) stage (\d{{1,9}}))?")
_COLLECTIVE = re.compile(rf"({'|'.join(CollectiveKind)}) stage (\d{{1,9}})")

COLLECTIVE_EVENT: Final = "collective"
"""The category of events that say when a collective ran."""


@cache
def action_name(action: Action) -> str:
    """Return the name of an action in a trace."""
    text = f"{action.kind.value} stage {action.stage} microbatch {action.microbatch}"
    return text if action.peer is None else f"{text} {'to' if action.sends else 'from'} stage {action.peer}"


def parse_action_name(text: str) -> Action | None:
    """Return the action of this name; None if it is not the name of an action."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    kind, stage, microbatch, way, peer = match.groups()
    if (way is not None) is not Kind(kind).is_transfer:
        return None
    return Action(int(stage), Kind(kind), int(microbatch), None if peer is None else int(peer))


def collective_name(collective: Collective) -> str:
    """Return the name of a collective in a trace."""
    return f"{collective.kind.value} stage {collective.stage}"


def parse_collective_name(text: str) -> Collective | None:
    """Return the collective of this name; None if it is not the name of a collective."""
    match = _COLLECTIVE.fullmatch(text)
    return None if match is None else Collective(int(match[2]), CollectiveKind(match[1]))
