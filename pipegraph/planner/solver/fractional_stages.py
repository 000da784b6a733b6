"""A lower bound for all cuts and options of a chain: stages of any parts of its segments, by linear programming."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.linear_program import LinearProgram
from pipegraph.planner.solver.makespan import Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.prefix_sums import Floats, LinearBound, quantities_of

_ROUNDS = 24  # of solving the program, then adding linear bounds that its solution exceeds
_ROWS = 16  # of the linear bounds that are exceeded the most, which a round adds
_EXCEEDS = 1e-3  # part of a bound
_EXACT = 1e-6  # of the solution of a linear program


class FractionalStages:
    """Stages that may have any parts of any segments, each part with any option that some stage may have.

    Cuts and options are one way to fill them, so none takes less than the fastest way. As a makespan, and what a rank
    needs, is the largest of linear bounds, a linear program finds it. Segments that have the same costs to choose from
    are one variable for each stage and cost. The first segment is in the first stage, and the last one in the last.

    Args:
        options: the costs of the segments with each option.
        makespan, memory: of stages with these options.
    """

    def __init__(self, options: Sequence[Sequence[SegmentCost]], makespan: Makespan, memory: MemoryNeed) -> None:
        self._makespan, self._memory = makespan, memory
        kinds: dict[tuple[str, frozenset[tuple[float, ...]]], list[int]] = {}
        for number, costs in enumerate(zip(*options, strict=True)):
            place = {0: "first", len(options[0]) - 1: "last"}.get(number, "between")
            kinds.setdefault((place, frozenset(map(quantities_of, costs))), []).append(number)
        every = range(memory.stages)
        stages = {"first": every[:1], "between": every, "last": every[-1:]}
        self._counts = np.array([len(numbers) for numbers in kinds.values()])
        choices = [
            (kind, stage, cost)
            for kind, (place, costs) in enumerate(kinds)
            for stage in stages[place]
            for cost in sorted(costs)
        ]
        self._kinds, self._stage, costs_of = (np.array(column) for column in zip(*choices, strict=True))
        self._costs: Floats = costs_of.T  # (quantities, variables)

    def least_makespan(self, enough: float = math.inf) -> float:
        """Return seconds that no cuts and options go below; infinite if none fit. It is not made tighter than
        ``enough``."""
        variables, limit = len(self._kinds), self._memory.limit
        pool, constants = self._table([*self._makespan.initial_bounds(), *self._makespan.path_bounds()])
        even = self._counts[self._kinds] / np.bincount(self._kinds)[self._kinds]
        scale = float((pool @ even + constants).max())  # so that no figure is far from 1
        if not scale:
            return 0.0
        program = LinearProgram()
        program.add_variables(np.append(np.zeros(variables), 1.0), np.zeros((0, variables + 1)))
        parts = np.arange(len(self._counts))[:, None] == np.append(self._kinds, -1)
        program.add_rows(parts.astype(np.float64), self._counts, self._counts)

        def add(table: Floats, makespan: float, most: Floats) -> None:
            """Add rows ``table`` @ shares + ``makespan`` × the makespan, the last variable, ≤ ``most``."""
            if len(table):
                rows = np.column_stack([table, np.full(len(table), makespan)])
                program.add_rows(rows / scale, np.full(len(table), -np.inf), most / scale)

        add(pool[: self._memory.ranks], -scale, -constants[: self._memory.ranks])
        least = 0.0
        for _ in range(_ROUNDS):
            try:
                solution = program.solve()
            except ArithmeticError:
                break
            if solution is None:
                return math.inf
            least, shares = scale * float(solution.values[-1]), solution.values[:-1]
            if least >= enough:
                break
            stages = self._stages_of(shares)
            values = pool @ shares + constants
            longest = np.argsort(-values)[:_ROWS]
            longest = longest[values[longest] > least * (1 + _EXCEEDS)]
            new_rows, more_constants = pool[longest], constants[longest]
            if not len(longest):
                new_rows, more_constants = self._table([self._makespan.longest_path(stages)])
                slower = new_rows @ shares + more_constants > least * (1 + _EXCEEDS)
                new_rows, more_constants = new_rows[slower], more_constants[slower]
            needs, need_constants = self._table(self._memory.tightest_bounds(stages))
            short = needs @ shares + need_constants > limit * (1 + _EXCEEDS)
            if not len(new_rows) and not short.any():
                break
            full = scale / limit
            add(new_rows, -scale, -more_constants)
            add(full * needs[short], 0.0, scale - full * need_constants[short])
        return least * (1 - _EXACT)

    def _table(self, bounds: Sequence[LinearBound]) -> tuple[Floats, Floats]:
        """Return what each variable adds to linear bounds, and their constants: (bounds, variables), (bounds,)."""
        rows = [np.einsum("qv,qv->v", bound.weights[:, self._stage], self._costs) for bound in bounds]
        return np.array(rows), np.array([bound.constant for bound in bounds])

    def _stages_of(self, shares: Floats) -> Floats:
        """Return the quantities of stages: (quantities, stages)."""
        return np.array([np.bincount(self._stage, row, self._memory.stages) for row in self._costs * shares])
