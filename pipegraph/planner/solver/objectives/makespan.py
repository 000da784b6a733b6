"""The makespan of a schedule, of many cuts at once."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pipegraph.planner.solver.objectives.action_graph import Network
from pipegraph.planner.solver.objectives.boundary_times import Crossings
from pipegraph.planner.solver.objectives.stage_paths import PARTS, Walk, walks
from pipegraph.planner.solver.prefix_sums import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Floats, Integers, Piece, Sums
from pipegraph.planner.solver.stage_schedule import once_for_each
from pipegraph.schedule import Kind, Schedule, Times

_TIMES = 3  # F, I and W
_network_of, _walks_of = once_for_each(Network), once_for_each(walks)


class Makespan:
    """Seconds of a step, as `simulate` has them."""

    def __init__(self, sums: Sums, schedule: Schedule, crossings: Crossings) -> None:
        self._sums, self._schedule, self._crossings = sums, schedule, crossings
        self._queued = bool((crossings.per_byte * sums.crossing.max()).any())

    @property
    def size(self) -> int:
        return self._network.size

    @cached_property
    def _walks(self) -> list[list[Walk]]:
        return _walks_of(self._schedule)

    @cached_property
    def _network(self) -> Network:
        return _network_of(self._schedule, self._queued)

    def values(self, cuts: Integers) -> Floats:
        return self._network.makespans(self.times(cuts), self._crossings.latency, self.transfers(cuts))

    def times(self, cuts: Integers) -> Floats:
        """Seconds of F, I and W: (3, stages, candidates).

        The first stage's I is of nothing: no gradient of the model's inputs is asked for, so that its kernels do all of
        the backward in W.
        """
        times = self._sums.stages(cuts)[:_TIMES]
        times[WEIGHT_GRAD, 0] += times[INPUT_GRAD, 0]
        times[INPUT_GRAD, 0] = 0.0
        return times

    def transfers(self, cuts: Integers) -> Floats:
        """Seconds that a microbatch occupies the link of each boundary: (boundaries, candidates)."""
        seconds: Floats = self._sums.crossing[cuts.T] * self._crossings.per_byte[:, None]
        return seconds

    def simulated(self, cuts: Integers) -> Times:
        """The times of one candidate, for `simulate`."""
        times, transfers = self.times(cuts[None]), self.transfers(cuts[None])
        forward, input_grad, weight_grad = times[..., 0].tolist()
        return Times(forward, input_grad, weight_grad, self._crossings.latency.tolist(), transfers[:, 0].tolist())

    def pieces(self) -> list[Piece]:
        """Of each rank: the way to its first action, and then all that it does."""
        found = []
        for order in self._schedule.actions:
            work = np.zeros((_TIMES, self._schedule.stages))
            first = order[0].stage
            work[FORWARD, :first] = 1.0
            for action in order:
                work[list(PARTS[action.kind]), action.stage] += 1.0
            hops = np.arange(self._schedule.stages - 1) < first
            found.append(self._piece(work, float(hops @ self._crossings.latency), np.zeros(len(hops))))
        return found

    def largest(self, cuts: Integers, mixture: Floats) -> Piece:
        times, transfers = self.times(cuts) @ mixture, self.transfers(cuts) @ mixture
        path = self._network.longest(times, self._crossings.latency, transfers)
        return self._piece(path.work, float(path.hops @ self._crossings.latency), path.transfers)

    def of_stage(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        before, hops = self._sums.before[:_TIMES], np.append(0.0, np.cumsum(self._crossings.latency))
        own = before[:, ends][:, :, None] - before[:, begins][:, None, :]
        if stage == 0:
            own[WEIGHT_GRAD] += own[INPUT_GRAD]
            own[INPUT_GRAD] = 0.0
        forward, backward = before[FORWARD], before[INPUT_GRAD] + (before[WEIGHT_GRAD] if self._whole else 0.0)
        hops_in, hops_on = hops[stage], hops[-1] - hops[stage]
        come, back = forward[begins] + hops_in, backward[begins] + hops_in  # from the first stage here, and back
        on = forward[-1] - forward[ends] + hops_on  # from here to the last stage
        turn = on + backward[-1] - backward[ends] + hops_on
        longest = np.zeros((len(ends), len(begins)))
        for walk in self._walks[stage]:
            length = np.tensordot(walk[:_TIMES], own, 1) + come + walk.returns * back
            length += (walk.turns * turn + walk.leaves * on)[:, None]
            np.maximum(longest, length, out=longest)
        return longest

    @cached_property
    def _whole(self) -> bool:
        """Whether every backward is a B, whose gradients leave when W is done too."""
        return not any(action.kind is Kind.I for order in self._schedule.actions for action in order)

    def _piece(self, work: Floats, constant: float, transfers: Floats) -> Piece:
        weights = work.copy()
        weights[INPUT_GRAD, 0] = weights[WEIGHT_GRAD, 0]
        return self._sums.piece(weights, transfers * self._crossings.per_byte, constant)
