"""Runs of a pipeline recorded as traces: written, read, merged and analysed. What it finds is presented by `report`.

What is written and read: names of actions, `F stage 1 microbatch 3`, `SEND_F stage 0 microbatch 3 to stage 1`.
"""

from __future__ import annotations

import re
from functools import cache

from pipegraph.schedule import Action, Kind

_NAME = re.compile(rf"({'|'.join(Kind)}) stage (\d{{1,9}}) microbatch (\d{{1,9}})(?: (to|from) stage (\d{{1,9}}))?")


@cache
def action_name(action: Action) -> str:
    """Return the name of an action in a trace."""
    text = f"{action.kind.value} stage {action.stage} microbatch {action.microbatch}"
    return text if action.peer is None else f"{text} {'to' if action.sends else 'from'} stage {action.peer}"


def parse_action_name(text: str) -> Action | None:
    """Return the action of this name; None if it is no name of an action."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    kind, stage, microbatch, way, peer = match.groups()
    if (way is not None) is not Kind(kind).is_transfer:
        return None
    return Action(int(stage), Kind(kind), int(microbatch), None if peer is None else int(peer))
