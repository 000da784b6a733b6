"""The colours of a schedule's actions, the same on a terminal and in a picture.

If ranks hold several stages, each kind has a dark tone for a rank's first stage and a light tone for its last; else it
has one tone. The tones stay apart for the common kinds of colour blindness: by 19 or more of CIE Lab's units (28 if
there is one each) as simulated by Machado et al. (2009). Text on them is white or black, the one that is easier to
read, on light and dark terminals alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from pipegraph.schedule import Action, CollectiveKind, Kind, Schedule

MEANING = {Kind.F: "forward", Kind.I: "input gradient", Kind.W: "weight gradient", Kind.B: "backward (I and W)"}
"""The kinds that compute, in the order of a legend."""

COLLECTIVES = {CollectiveKind.UNSHARD: "#6b4c9a", CollectiveKind.REDUCE_GRAD: "#cbb8e8"}
"""The colours of the collectives that take time."""

COLLECTIVE_MEANING = {CollectiveKind.UNSHARD: "parameters gathered", CollectiveKind.REDUCE_GRAD: "gradients reduced"}

MEMORY = {
    "parameters": "#274c77",
    "gradients": "#6096ba",
    "optimizer state": "#a3cef1",
    "model buffers": "#8d99ae",
    "activations": "#2f9e77",
    "receive buffers": "#e0a458",
    "transient": "#c8553d",
    "allowance": "#d9d9d9",
}
"""The colour of each kind of memory."""

_MOST_TONES = 4  # of one kind in a legend
_ALONE = {Kind.F: "#1b5faa", Kind.I: "#f0b93a", Kind.W: "#8d9b9a", Kind.B: "#9a3324"}
_TONES = {
    Kind.F: ("#1b5faa", "#9cc4ee"),  # blue
    Kind.I: ("#b27a00", "#f7ce62"),  # amber
    Kind.W: ("#4a5a5a", "#b9c6c2"),  # grey
    Kind.B: ("#9a3324", "#f09a86"),  # red
}


@dataclass(frozen=True)
class ActionColours:
    """The colours of one schedule.

    Attributes:
        kinds: those that compute in it, in the order of a legend.
        chunks: of each stage, its place among the stages of its rank, from 0.
        most: stages on the rank that holds the most of them.
    """

    kinds: tuple[Kind, ...]
    chunks: tuple[int, ...]
    most: int

    @classmethod
    def from_schedule(cls, schedule: Schedule) -> ActionColours:
        present = {action.kind for row in schedule.actions for action in row}
        chunks = [schedule.placement[:stage].count(rank) for stage, rank in enumerate(schedule.placement)]
        return cls(tuple(kind for kind in MEANING if kind in present), tuple(chunks), max(chunks) + 1)

    def fill(self, action: Action) -> str:
        """Return ``#rrggbb`` for an action."""
        return colour(action.kind, self.chunks[action.stage], self.most)

    def legend(self) -> list[tuple[Kind, list[str]]]:
        """Return each kind with its tones: all of them, or the first and the last of many."""
        chunks = range(self.most) if self.most <= _MOST_TONES else (0, self.most - 1)
        return [(kind, [colour(kind, chunk, self.most) for chunk in chunks]) for kind in self.kinds]

    @property
    def tones(self) -> str:
        """What the tones mean; empty if there is one of each kind."""
        return "dark to light: a rank's first to last stage" if self.most > 1 else ""


def colour(kind: Kind, chunk: int = 0, chunks: int = 1) -> str:
    """Return ``#rrggbb`` for an action on the rank's stage number ``chunk`` of ``chunks``."""
    if chunks == 1:
        return _ALONE[kind]
    dark, light = (_channels(tone) for tone in _TONES[kind])
    part = chunk / (chunks - 1)
    mixed = (round(low + (high - low) * part) for low, high in zip(dark, light, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


class Marks(TypedDict):
    """How a box of `Drawing` says its kind without colour."""

    hatch: str
    foot: str


def marks(kind: Kind, fill: str) -> Marks:
    """Return what a box of a kind has: I a hatch, W a bar at its foot, and B, which is both, both."""
    on = ink(fill)
    return {"hatch": on if kind in (Kind.I, Kind.B) else "", "foot": on if kind in (Kind.W, Kind.B) else ""}


def ink(background: str) -> str:
    """Return white or black, the one with the larger contrast (WCAG 2) with ``#rrggbb``."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in _channels(background))
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
