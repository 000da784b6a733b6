"""The balances: the figures that a plan makes equal between stages, and the weights of those that are no times."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from torch import fx

from pipegraph.arguments import argument
from pipegraph.cost.segments.chain import Chain
from pipegraph.errors import ArgumentError, PlanError, nearest
from pipegraph.graph.captured import Captured, StateEntry
from pipegraph.graph.nodes import path_of

UNIFORM = "uniform"
"""The balance that prices nothing: equal numbers of segments."""

AUTO = "auto"
"""The balance that runs the distinct layers if the device is available, and is ``time`` otherwise."""

BALANCES = {
    AUTO: "s",
    "time": "s",
    "measured": "s",
    "flops": "FLOP",
    "parameters": "parameters",
    "type": "layers",
    "memory": "bytes",
    UNIFORM: "s",
}
"""balance → the unit of F, I and W. ``type`` is followed by a colon and a regular expression."""

TIMED = (AUTO, "time", "measured")
"""The balances that make the time of a step the least. Any other makes the largest stage the smallest."""

PRICED = tuple(name for name in BALANCES if name != UNIFORM)
"""The balances for which segments have a price."""


def parse_balance(balance: object, choices: Collection[str] = BALANCES) -> tuple[str, str]:
    """Return the name of a balance, and the pattern of ``type:PATTERN``. Raises ArgumentError for any other text.

    It does not check whether the pattern matches a layer of a model.
    """
    name, colon, pattern = str(balance).partition(":")
    if name not in choices or bool(colon) != (name == "type") or (name == "type" and not pattern):
        balance_names = [f"{choice}:REGEX" if choice == "type" else choice for choice in choices]
        raise ArgumentError(
            f'Stages cannot be balanced by "{balance}".{nearest(str(balance), balance_names)}',
            f"{argument('balance')} with one of {', '.join(balance_names)}.",
        )
    return name, pattern


def begins_of_type(captured: Captured, pattern: str) -> list[int]:
    """The positions in ``Captured.nodes`` at which the calls of modules with a matching class name begin.

    Of nested calls only the outermost counts. As in DeepSpeed's ``type:regex``, the pattern matches anywhere in the
    name, in upper or lower case.

    Raises:
        PlanError: the pattern is not a regular expression, or matches no class.
    """
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        types = _types(captured) or ["layer"]
        near = next(iter(get_close_matches(pattern, types, n=1, cutoff=0.0)), types[0])
        raise PlanError(f"type:{pattern} is not a regular expression: {error}.", f"type:{near}.") from None
    begins: dict[str, int] = {}
    for position, node in enumerate(captured.nodes):
        matching = (call for call, fqn in path_of(node) if regex.search(captured.modules[fqn].class_name))
        call = next(matching, None)
        if call is not None:
            begins.setdefault(call, position)
    if not begins:
        raise _no_match(captured, pattern)
    return list(begins.values())


def _types(captured: Captured) -> list[str]:
    """The classes of the modules that the model calls."""
    called = {fqn for node in captured.nodes for _, fqn in path_of(node)}
    return sorted({captured.modules[fqn].class_name for fqn in called})


def _no_match(captured: Captured, pattern: str) -> PlanError:
    types = _types(captured)
    problem = f"type:{pattern} matches no module that {captured.model_name} calls"
    if not types:
        return PlanError(f"{problem}: it calls none.", f"{argument('balance', 'time')}.")
    return PlanError(f"{problem}.{nearest(pattern, types)}", f"a pattern that matches one of {', '.join(types)}.")


def first_uses(chain: Chain, segments: Sequence[Sequence[fx.Node]]) -> list[list[StateEntry]]:
    """The parameters, buffers and constants of each segment, given the state that it reads: what several read where it
    is used first."""
    used_fqns: set[str] = set()
    segment_entries = []
    for state in segments:
        entries = [chain.captured.state[str(node.target)] for node in state]
        new = [entry for entry in entries if entry.fqn not in used_fqns]
        used_fqns |= {entry.fqn for entry in new}
        segment_entries.append(new)
    return segment_entries
