"""What several ranks must have alike, compared by name: which of it differs, on which rank, and how.

{"seed": "0", …} ─ a number for each text ─▶ all ranks ─▶ all the same, and nothing else is sent
                                                      └─▶ the first text that differs, from every rank
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from pipegraph.errors import ArgumentError
from pipegraph.runtime.processes.world import World, fingerprint

_SHORT: Final = 60
"""Characters that a message shows of a text."""
_CONTEXT_LENGTH: Final = 20
"""How many of them come before the place where a longer text differs from another."""


def check_agreement(world: World, texts: Mapping[str, str], *dimensions: str) -> None:
    """Raise ArgumentError, on all ranks in a line along these dimensions, unless they pass the same texts.

    Collective: all of them must call it, with texts under the same names.
    """
    numbers = [fingerprint(text.encode()) for text in texts.values()]
    rows = world.gather(numbers, *dimensions)
    for name, column in zip(texts, zip(*rows, strict=True), strict=True):
        if len({*column}) > 1:
            ranks = world.grid.line(world.rank, *dimensions)
            every = dict(zip(ranks, world.gather_text(texts[name], *dimensions), strict=True))
            usual = Counter(every.values()).most_common(1)[0][0]  # of equally many that of the first rank
            odd = next(rank for rank in ranks if every[rank] != usual)
            usual_rank = next(rank for rank in ranks if every[rank] == usual)
            odd_part, usual_part = _differing_parts(every[odd], usual)
            raise ArgumentError(
                f"{name} is {odd_part} on {world.grid.text(odd)}, and {usual_part} on {world.grid.text(usual_rank)}.",
                "the same on every rank.",
            )


def _differing_parts(first_text: str, second_text: str) -> tuple[str, str]:
    """Two texts, or what is around the first place where they differ."""
    start = 0
    if max(len(first_text), len(second_text)) > _SHORT:
        differing = (place for place, (a, b) in enumerate(zip(first_text, second_text, strict=False)) if a != b)
        place = next(differing, min(len(first_text), len(second_text)))
        start = max(first_text.rfind(" ", 0, place) + 1, place - _CONTEXT_LENGTH, 0)

    def part(text: str) -> str:
        end = start + _SHORT
        return f"{'…' if start else ''}{text[start:end].strip() or 'nothing more'}{'…' if end < len(text) else ''}"

    return part(first_text), part(second_text)
