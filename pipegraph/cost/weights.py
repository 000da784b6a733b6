"""Weights that balance a model without times: how many layers, parameters or bytes a segment has."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from pipegraph.cost.chain import Chain
from pipegraph.errors import PlanError, nearest
from pipegraph.graph.captured import Captured, State, path_of


def layers_of_type(chain: Chain, pattern: str) -> list[int]:
    """How many calls of a module whose class name matches begin in each segment; of nested ones the outermost counts.

    As DeepSpeed's ``type:regex``: anywhere in the name, upper and lower case alike.

    Raises:
        PlanError: the pattern is none, or matches no class.
    """
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PlanError(f"type:{pattern} is no regular expression: {error}.\nTry: type:layer.") from error
    modules = chain.captured.modules
    seen: set[str] = set()
    counts = []
    for index in range(len(chain.segments)):
        calls = (_outermost(node, chain.captured, wanted) for node in chain.nodes(index, index + 1))
        begun = {call for call in calls if call is not None} - seen
        seen |= begun
        counts.append(len(begun))
    if not seen and pattern:
        called = {fqn for node in chain.captured.nodes for _, fqn in path_of(node)}
        types = sorted({modules[fqn].class_name for fqn in called})
        raise PlanError(
            f"type:{pattern} matches no module that {chain.captured.model_name} calls.{nearest(pattern, types)}\n"
            f"Try: a pattern that matches one of {', '.join(types)}."
        )
    return counts


def _outermost(node: fx.Node, captured: Captured, wanted: re.Pattern[str]) -> str | None:
    matching = (call for call, fqn in path_of(node) if wanted.search(captured.modules[fqn].class_name))
    return next(matching, None)


def first_uses(chain: Chain, segments: Sequence[Sequence[fx.Node]]) -> list[list[State]]:
    """The parameters of each segment, given the state that it reads: a tied one where it is used first."""
    seen: set[str] = set()
    found = []
    for state in segments:
        entries = [chain.captured.state[str(node.target)] for node in state]
        new = [entry for entry in entries if entry.kind == "parameter" and entry.fqn not in seen]
        seen |= {entry.fqn for entry in new}
        found.append(new)
    return found
