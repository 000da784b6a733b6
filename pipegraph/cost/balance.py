"""The balances: the figures that a plan makes equal between stages."""

from __future__ import annotations

from collections.abc import Collection

from pipegraph.errors import ArgumentError, nearest

UNIFORM = "uniform"
"""The balance that prices nothing: equal numbers of segments."""

BALANCES = {
    "time": "s",
    "measured": "s",
    "flops": "FLOP",
    "parameters": "parameters",
    "type": "layers",
    "memory": "bytes",
    UNIFORM: "s",
}
"""balance → the unit of F, I and W. ``type`` is followed by a colon and a regular expression."""

TIMED = ("time", "measured")
"""The balances that make the time of a step the least. Any other makes the largest stage the smallest."""

PRICED = tuple(name for name in BALANCES if name != UNIFORM)
"""The balances for which segments have a price."""


def parse_balance(balance: object, choices: Collection[str] = BALANCES) -> tuple[str, str]:
    """Return the name of a balance, and the pattern of ``type:PATTERN``. Raises ArgumentError for any other text.

    It does not check whether the pattern matches a layer of a model.
    """
    name, colon, pattern = str(balance).partition(":")
    if name not in choices or bool(colon) != (name == "type") or (name == "type" and not pattern):
        known = [f"{each}:REGEX" if each == "type" else each for each in choices]
        raise ArgumentError(
            f'Stages cannot be balanced by "{balance}".{nearest(str(balance), known)}\n'
            f"Try: --balance with one of {', '.join(known)}."
        )
    return name, pattern
