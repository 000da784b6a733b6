"""The devices of a pipeline whose ranks have unequal ones: ``h100*4,a100*4``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipegraph.arguments import argument
from pipegraph.cost.hardware import Hardware, Link
from pipegraph.errors import ArgumentError


@dataclass(frozen=True)
class RankProfiles:
    """The hardware profile of each rank.

    Ranks after one another that have the same profile stand in nodes of it, which are counted from the first of them.
    Devices of two profiles stand in different nodes.

    Attributes:
        profiles: of each rank.
    """

    profiles: tuple[Hardware, ...]

    @property
    def ranks(self) -> int:
        return len(self.profiles)

    @cached_property
    def distinct(self) -> tuple[Hardware, ...]:
        """The profiles, each once."""
        distinct: list[Hardware] = []
        for profile in self.profiles:
            if profile not in distinct:
                distinct.append(profile)
        return tuple(distinct)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """For each rank the position of its profile in `distinct`."""
        return tuple(map(self.distinct.index, self.profiles))

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        """For each rank the first of those that have its profile and come right before it."""
        groups = itertools.groupby(range(self.ranks), key=lambda rank: self.numbers[rank])
        return tuple(group[0] for group in (list(ranks) for _, ranks in groups) for _ in group)

    @property
    def name(self) -> str:
        """``h100*4,a100*4``, as `load_profiles` reads it."""
        groups = itertools.groupby(self.profiles, key=lambda profile: profile.name)
        counts = [(name, len(list(group))) for name, group in groups]
        return ",".join(f"{name}*{count}" if count > 1 else name for name, count in counts)

    @property
    def is_cpu(self) -> bool:
        """Whether every device is a CPU."""
        return all(profile.is_cpu for profile in self.distinct)

    @property
    def host_link(self) -> Link | None:
        """The slowest of the links to CPU memory; None if one of them is not known."""
        links = [profile.host_link for profile in self.distinct]
        known_links = [link for link in links if link is not None]
        return slowest(known_links) if len(known_links) == len(links) else None

    def link(self, rank: int, other_rank: int) -> Link:
        """The link from a rank to another: between devices of two profiles, the slower of their links between nodes."""
        profile, first = self.profiles[rank], self._first_ranks[rank]
        if self._first_ranks[other_rank] == first:
            return profile.link(rank - first, other_rank - first)
        of_profiles = (profile.links, self.profiles[other_rank].links)
        return slowest([links.inter_node or links.intra_node for links in of_profiles])


def slowest(links: Sequence[Link]) -> Link:
    """Return a link with the largest latency and the smallest bandwidth of several."""
    return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


Profile = Hardware | str | os.PathLike[str]
"""A profile, its name or its file."""
Profiles = RankProfiles | Profile | Sequence[Profile]
"""What `load_profiles` reads."""


def load_profiles(hardware: Profiles) -> Hardware | RankProfiles:
    """Return the profile of all ranks, or one for each.

    Args:
        hardware: a profile, its name or its file; a sequence of these, one for each rank; or text with numbers of
            ranks: ``h100*4,a100*4``.

    Raises:
        ArgumentError: there are no profiles, or a number of ranks is not a whole number from 1 on.
        PipegraphError: as `Hardware.load` does.
    """
    if isinstance(hardware, Hardware | RankProfiles):
        return hardware
    if isinstance(hardware, str | os.PathLike):
        text = os.fspath(hardware)
        if not set("*,") & set(text) or os.path.exists(text):
            return Hardware.load(text)
        counts: list[tuple[Profile, int]] = [_counted(part, text) for part in text.split(",")]
    else:
        counts = [(profile, 1) for profile in hardware]
    if not counts:
        raise ArgumentError("hardware has no profile.", f"{argument('hardware', 'h100')}, or one for each rank.")
    profiles: list[Hardware] = []
    for profile, count in counts:
        profiles += [profile if isinstance(profile, Hardware) else Hardware.load(os.fspath(profile))] * count
    return RankProfiles(tuple(profiles))


def _counted(part: str, text: str) -> tuple[str, int]:
    """``("h100", 4)`` for ``h100*4``. Raises ArgumentError."""
    name, star, number = part.strip().rpartition("*")
    if not star:
        return number, 1
    if not number.strip().isdecimal() or int(number) < 1:
        raise ArgumentError(
            f'In hardware "{text}", {part.strip()!r} does not end with a number of ranks.',
            f"{argument('hardware', 'h100*4,a100*4')}: four ranks of each.",
        )
    return name.strip(), int(number)
