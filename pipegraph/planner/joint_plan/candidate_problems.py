"""What a candidate of a joint plan takes at least, and the cuts and choices that it leaves open."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache

from pipegraph.cost.hardware import Link
from pipegraph.planner.joint_plan.choices import JointCandidate
from pipegraph.planner.joint_plan.layout import Layout
from pipegraph.planner.joint_plan.layout_costs import LayoutCosts
from pipegraph.planner.solver.option_search import OptionProblem
from pipegraph.planner.solver.solve_arguments import resolve_schedule
from pipegraph.schedule import Kind, Schedule, build

_FEW_LAYERS = 32  # of a model of fewer, all cuts are looked at for every candidate
_KEPT_PROBLEMS = 4  # of candidates whose bound was made tighter, and whose turn may come soon


class CandidateProblems:
    """The cuts and choices of candidates, and bounds of what these take.

    Args:
        costs: the prices of the model.
        memory_bytes: of a device; None for any.
    """

    def __init__(self, costs: LayoutCosts, memory_bytes: float | None) -> None:
        self._costs, self._memory = costs, memory_bytes
        self._problems: dict[tuple[JointCandidate, bool], OptionProblem] = {}
        self._fractional: dict[JointCandidate, float] = {}
        self._slowest: dict[JointCandidate, float] = {}

    def may_fit(self, candidate: JointCandidate) -> bool:
        """Whether the mean over ranks of what they hold at least is no more than the limit: parameters, and what one
        microbatch keeps."""
        if self._memory is None:
            return True
        totals = self._costs.totals(candidate.layout, candidate.rows)
        state_bytes = totals.parameter_bytes * candidate.state_factor
        return (state_bytes + totals.saved_bytes) / candidate.layout.pp <= self._memory

    def bound(self, candidate: JointCandidate) -> float:
        """Return seconds that no cuts and choices of a candidate go below: its work, divided between ranks so that all
        of them end together, and the least that can be gathered and reduced."""
        layout, microbatches = candidate.layout, candidate.microbatches
        exposed = self.least_exposed(candidate)
        if candidate.chunks > 1:
            return microbatches * self._costs.totals(layout, candidate.rows).seconds / layout.pp + exposed
        is_whole = _has_whole_backwards(candidate.schedule)
        return self._costs.least_makespan(layout, candidate.rows, microbatches, is_whole) + exposed

    def tight_bound(self, candidate: JointCandidate, enough: float = math.inf) -> float:
        """Return seconds that no cuts and choices of a candidate go below, by stages of parts of segments, however its
        copies are divided. Once found, it stays; it is not made tighter than ``enough``."""
        leanest, exposed = min_memory_variant(candidate), self.least_exposed(candidate)
        if leanest not in self._fractional:
            self._fractional[leanest] = self.problem(leanest, whole_layers=False).fractional_bound(enough - exposed)
        return max(self.bound(candidate), self._fractional[leanest] + exposed)

    def slowest_stage(self, candidate: JointCandidate) -> float:
        """Return what a pipeline takes at least that is cut between layers, however its copies are divided."""
        leanest = min_memory_variant(candidate)
        if leanest not in self._slowest:
            self._slowest[leanest] = self.problem(leanest, whole_layers=True).lower_bound
        return self._slowest[leanest]

    def least_exposed(self, candidate: JointCandidate) -> float:
        """Return the least that what the copies exchange can add to a step."""
        layout, totals = candidate.layout, self._costs.totals(candidate.layout, candidate.rows)
        stage_bytes = totals.parameter_bytes / layout.pp if candidate.chunks == 1 else 0
        hardware = self._costs.hardware
        collectives = layout.gather_seconds(hardware, stage_bytes) + layout.reduce_seconds(hardware, stage_bytes)
        return collectives + layout.agreement_seconds(hardware)

    def problem(self, candidate: JointCandidate, whole_layers: bool) -> OptionProblem:
        """Return the cuts and choices of a candidate; with ``whole_layers`` between layers alone, if these suffice."""
        key = candidate, whole_layers and self.has_enough_layers(candidate)
        if key not in self._problems:
            options, stages = self._costs.options(candidate.layout, candidate.rows), candidate.stages
            hidden = self._costs.hidden(candidate.layout, candidate.rows)
            while len(self._problems) >= _KEPT_PROBLEMS:
                del self._problems[next(iter(self._problems))]
            self._problems[key] = OptionProblem(
                self._costs.layer_options(candidate.layout, candidate.rows)
                if key[1]
                else [costs.segments for costs in options],
                _schedule(candidate.schedule, stages, candidate.microbatches, candidate.layout.pp),
                memory_bytes=self._memory,
                link=self.link(candidate.layout),
                allowed=None if len(hidden) == len(options) else [hidden] * stages,
                state_factor=candidate.state_factor,
            )
        return self._problems[key]

    @property
    def have_many_layers(self) -> bool:
        """Whether cuts between layers are looked at first."""
        return len(self._costs.layers) >= _FEW_LAYERS

    def has_enough_layers(self, candidate: JointCandidate) -> bool:
        """Whether a candidate can be cut between layers."""
        return self.have_many_layers and candidate.stages <= len(self._costs.layers)

    def link(self, layout: Layout) -> Callable[[int, int], Link]:
        """Return (rank, other rank) of one pipeline → their link."""
        return lambda rank, peer: self._costs.hardware.link(rank * layout.stride, peer * layout.stride)


def min_memory_variant(candidate: JointCandidate) -> JointCandidate:
    """Return a candidate with the division of its copies, and as few whole stages, as leave the most memory."""
    layout = candidate.layout
    resident = 1 if candidate.chunks > 1 and layout.copies > 1 else None
    return replace(candidate, layout=replace(layout, dp_replicate=1, dp_shard=layout.copies), resident=resident)


@cache
def _has_whole_backwards(name: str) -> bool:
    """Whether all backwards of a schedule are B, so that an earlier stage's last one begins when a later one ends."""
    schedule = build(name, 2, 4)
    return all(action.kind in (Kind.F, Kind.B) for row in schedule.actions for action in row)


@lru_cache(maxsize=32)
def _schedule(name: str, stages: int, microbatches: int, ranks: int) -> Schedule:
    """Return a schedule, the same object each time: what is known of it is looked up at once, not compared action by
    action."""
    return resolve_schedule(name, stages, microbatches, None, ranks)
