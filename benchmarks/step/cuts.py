"""Where to cut: a shortlist by simulation with the measured times of segments, then the fastest of the shortlist."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.step.models import Case
from pipegraph.cost import SegmentCost
from pipegraph.cost.block_times import Cache, MeasureOptions
from pipegraph.cost.price import price
from pipegraph.graph.partition.split_points import Point, locate
from pipegraph.schedule import PLACEMENTS, Schedule, Times, build, join_backwards, lower_bound, search, simulate

Cuts = tuple[str, ...]
RANKS = 2
SEARCHES = (1, "loop", 2), (1, "loop", 3), (2, "v", 2), (2, "v", 3), (2, "loop", 3)
"""(stages on a rank, placement, microbatches whose activations a rank may hold) of each search"""
SIMULATED = 2000  # cuts whose busiest rank has the least to do
SEARCHED = 20  # cuts with the smallest lower bounds, for each of which orders are searched
HOP = 0.001  # seconds that a boundary of 0.5 MiB takes between two processes


@dataclass(frozen=True)
class Candidate:
    """A schedule with its cuts.

    Attributes:
        makespan: what the simulator gives it.
        found: how it was chosen; empty if it was given.
    """

    schedule: str | Schedule
    cuts: Cuts
    makespan: float = 0.0
    found: str = ""


class CutSearch:
    """Finds candidates with the times of segments.

    Args:
        case: what is run.
        captured: the model, for a microbatch.
        measured: whether segments are measured here, in two processes at the same time; otherwise by a roofline.
    """

    def __init__(self, case: Case, captured: Any, measured: bool) -> None:
        self._microbatches = case.microbatches
        starts = locate(captured, [Point(place) for place in case.places])
        with tempfile.TemporaryDirectory() as folder:  # what was measured at another time is not taken
            self._priced = price(
                captured,
                "measured" if measured else "time",
                loss=(case.loss, case.microbatch()[1]),
                setting=MeasureOptions(threads=1, ranks=RANKS),
                cache=Cache(Path(folder)),
                cut_positions=starts,
            )
        segments = self._priced.chain.segments
        self._indices = {str(segment.point): at for at, segment in enumerate(segments) if segment.point is not None}
        begins = [segment.start for segment in segments]
        self._indices |= {place: begins.index(start) for place, start in zip(case.places, starts, strict=True)}
        self._between, self._anywhere = case.places, tuple(dict.fromkeys([*case.places, *self._indices]))
        self._stage = cache(self._priced.stage)

    def shortlist(self, schedule: str, inside: bool, count: int) -> list[Candidate]:
        """Return `count` cuts between layers to try, and with `inside` the same number that may be inside layers.

        Only pipegraph's stages can be cut inside layers; they have whole backwards if nothing waits for them.
        """
        candidates = []
        for places in (self._anywhere, self._between) if inside else (self._between,):
            candidates += self._searched(places) if schedule == "searched" else self._named(schedule, places, count)
        if inside:
            candidates = [self._joined(candidate) for candidate in candidates]
        return list({(candidate.schedule, candidate.cuts): candidate for candidate in candidates}.values())

    def _stages(self, cuts: Iterable[str]) -> list[SegmentCost]:
        bounds = [0, *(self._indices[cut] for cut in cuts), len(self._priced.costs)]
        return [self._stage(start, stop) for start, stop in itertools.pairwise(bounds)]

    def _times(self, cuts: Iterable[str]) -> Times:
        stages = self._stages(cuts)
        figures = ([getattr(stage, name) for stage in stages] for name in ("forward", "input_grad", "weight_grad"))
        return Times(*figures, hop=HOP)

    def _promising(self, places: Iterable[str], placement: Sequence[int], count: int) -> list[Cuts]:
        """Return the `count` cuts at these places whose busiest rank has the least to do."""

        def most(cuts: Cuts) -> float:
            loads = [0.0] * RANKS
            for rank, stage in zip(placement, self._stages(cuts), strict=True):
                loads[rank] += stage.forward + stage.input_grad + stage.weight_grad
            return max(loads)

        return sorted(self._combinations(places, len(placement) - 1), key=most)[:count]

    def _combinations(self, places: Iterable[str], count: int) -> Iterator[Cuts]:
        """Return all ways to cut at `count` of these places, in the model's order."""
        distinct = {self._indices[place]: place for place in reversed(tuple(places))}
        return itertools.combinations([distinct[index] for index in sorted(distinct)], count)

    def _named(self, name: str, places: Iterable[str], count: int) -> list[Candidate]:
        """Return the cuts with the smallest simulated makespans of a named schedule."""
        schedule = build(name, RANKS, self._microbatches)
        candidates = [
            Candidate(name, cuts, simulate(schedule, self._times(cuts)).makespan)
            for cuts in self._promising(places, schedule.placement, SIMULATED)
        ]
        return sorted(candidates, key=_makespan)[:count]

    def _joined(self, candidate: Candidate) -> Candidate:
        """Return the candidate with whole backwards where nothing waits for them."""
        schedule = candidate.schedule
        built = build(schedule, RANKS, self._microbatches) if isinstance(schedule, str) else schedule
        joined = join_backwards(built, self._times(candidate.cuts))
        return candidate if joined is built else replace(candidate, schedule=joined)

    def _searched(self, places: Sequence[str]) -> list[Candidate]:
        """Return the best candidate of each of `SEARCHES`, of the cuts under which no order can be much slower."""
        candidates = []
        for chunks, shape, limit in SEARCHES:
            bound = partial(self._bound, PLACEMENTS[shape].places(RANKS, chunks), limit * chunks)
            promising = sorted(self._combinations(places, RANKS * chunks - 1), key=bound)[:SEARCHED]
            candidates.append(min((self._order(cuts, shape, limit * chunks) for cuts in promising), key=_makespan))
        return candidates

    def _bound(self, ranks: Sequence[int], memory_limit: int, cuts: Cuts) -> float:
        """Return the seconds that every order of these stages takes at least."""
        return lower_bound(self._times(cuts), ranks, self._microbatches, memory_limit)

    def _order(self, cuts: Cuts, shape: str, memory_limit: int) -> Candidate:
        best = search(self._times(cuts), RANKS, self._microbatches, shape, memory_limit, effort=0.05)
        return Candidate(best, cuts, best.makespan)


def _makespan(candidate: Candidate) -> float:
    return candidate.makespan
