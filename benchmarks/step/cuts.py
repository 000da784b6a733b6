"""Where to cut: a shortlist by simulation with the measured times of units, then the fastest of the shortlist."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.step.model import StepSetting
from pipegraph.schedule import Schedule, Times, build, lower_bound, search, simulate

Cuts = tuple[int, ...]
RANKS = 2
SEARCHES = (1, 2), (2, 2), (2, 3)
"""(stages on a rank, microbatches whose activations a rank may hold) of each search"""
PROMISING = 10  # cuts with the smallest lower bounds, which are searched
HOP = 0.001  # seconds that a boundary of 0.5 MiB takes between two processes


@dataclass(frozen=True)
class Candidate:
    """A schedule with its cuts, and the makespan that the simulator gives it."""

    schedule: str | Schedule
    cuts: Cuts
    makespan: float


def probe(setting: StepSetting) -> Cuts:
    """Return the cuts of the `zb-v` pipeline that `unit_times` measures: an attention and the head alone are stages."""
    return 2, 3, setting.units - 1


def unit_times(setting: StepSetting, kernels: Mapping[tuple[int, str], float]) -> Times:
    """Return the seconds of F, I and W of every unit, from the stages of `probe`; all layers are equal."""
    figures = {kind: [kernels[stage, kind] for stage in range(4)] for kind in "FIW"}
    columns = {}
    for kind, (_, attention, rest, head) in figures.items():
        mlp = max(0.0, rest - (setting.layers - 2) * attention) / (setting.layers - 1)
        columns[kind] = [*(attention, mlp) * setting.layers, head]
    # The first layer's I is part of its W. The rest of its stage's time is the embedding.
    first = sum(column[0] for column in figures.values())
    columns["W"][0] += max(0.0, first - sum(sum(column[:2]) for column in columns.values()))
    return Times(*columns.values())


def stage_times(units: Times, cuts: Cuts) -> Times:
    """Return the times of stages cut at these units. Stage 0 has no input gradient; its W is the whole backward."""
    bounds = (0, *cuts, units.stages)
    spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    f, i, w = (
        [sum(figures[span]) for span in spans] for figures in (units.forward, units.input_grad, units.weight_grad)
    )
    return Times(f, [0.0, *i[1:]], [i[0] + w[0], *w[1:]], hop=HOP)


def named_candidates(
    setting: StepSetting, units: Times, name: str, places: Iterable[int], count: int
) -> list[Candidate]:
    """Return the cuts, at some of these units, with the smallest simulated makespans of a named schedule."""
    schedule = build(name, RANKS, setting.microbatches)
    found = [
        Candidate(name, cuts, simulate(schedule, stage_times(units, cuts)).makespan)
        for cuts in itertools.combinations(places, schedule.stages - 1)
    ]
    return sorted(found, key=_makespan)[:count]


def searched(setting: StepSetting, units: Times, cuts: Cuts, microbatches_held: int) -> Candidate:
    """Search a schedule for these stages: one on a rank in a loop, or two in a V."""
    chunks = (len(cuts) + 1) // RANKS
    times = stage_times(units, cuts)
    limit = microbatches_held * chunks
    best = search(times, RANKS, setting.microbatches, "v" if chunks == 2 else "loop", limit, effort=0.05)
    return Candidate(best, cuts, best.makespan)


def searched_candidates(setting: StepSetting, units: Times, places: Sequence[int]) -> list[Candidate]:
    """Return the best candidate of each of `SEARCHES`."""
    found = []
    for chunks, held in SEARCHES:
        placement = build("zb-v" if chunks == 2 else "zb-h1", RANKS, setting.microbatches).placement

        def bound(cuts: Cuts, placement: tuple[int, ...] = placement) -> float:
            return lower_bound(stage_times(units, cuts), placement, setting.microbatches)

        promising = sorted(itertools.combinations(places, chunks * RANKS - 1), key=bound)[:PROMISING]
        found.append(min((searched(setting, units, cuts, held) for cuts in promising), key=_makespan))
    return found


def shortlist(setting: StepSetting, units: Times, name: str, inside: bool, count: int) -> list[Candidate]:
    """Return what is worth trying: cuts between layers and, with `inside`, as many that may cut layers too.

    The times of units do not contain what a cut costs the kernels on its two sides: a whole layer is cheaper.
    """
    found = []
    for places in (range(2, setting.units, 2), range(1, setting.units)) if inside else (range(2, setting.units, 2),):
        if name == "searched":
            found += searched_candidates(setting, units, places)
        else:
            found += named_candidates(setting, units, name, places, count)
    return list({(candidate.schedule, candidate.cuts): candidate for candidate in found}.values())


def _makespan(candidate: Candidate) -> float:
    return candidate.makespan


def fastest(candidates: Sequence[Candidate], trial: Callable[[Sequence[Candidate]], Sequence[float]]) -> Candidate:
    """Return the candidate that takes the least time if all are tried in turns."""
    seconds = trial(candidates)
    return min(zip(seconds, candidates, strict=True), key=lambda pair: pair[0])[1]
