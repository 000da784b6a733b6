"""Linear programs that grow, and what they solve: matrix games, and a chain whose stages may have parts of segments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.makespan import Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.prefix_sums import Booleans, Floats, Integers, LinearBound, quantities_of

if TYPE_CHECKING:
    from highspy import Highs, HighsModelStatus

# ---- programs and games ----------------------------------------------------------------------------------------------


_TINY = 1e-10


class LinearSolution(NamedTuple):
    """What solves a linear program.

    Attributes:
        values: of the variables.
        duals: of the rows: how much more the program costs for one more on a row's limit.
    """

    values: Floats
    duals: Floats


class LinearProgram:
    """Minimises ``costs`` @ x, where rows @ x stay within their limits.

    When variables or rows are added, the simplex method continues from the last solution, and takes a few steps only.
    """

    def __init__(self) -> None:
        self._solver = _quiet_solver()

    def add_variables(self, costs: Floats, table: Floats, lowest: float = 0.0) -> None:
        """Add variables from ``lowest`` on; ``table`` says what they add to the rows that are there: (rows,
        variables)."""
        number, (count, starts, rows, values) = len(costs), _sparse(table.T)
        lower, upper = np.full(number, lowest), np.full(number, np.inf)
        self._solver.addCols(number, costs, lower, upper, count, starts, rows, values)

    def add_rows(self, table: Floats, lower: Floats, upper: Floats) -> None:
        """Add ``lower`` ≤ ``table`` @ x ≤ ``upper``; the table is (rows, variables)."""
        count, starts, columns, values = _sparse(table)
        self._solver.addRows(len(table), lower, upper, count, starts, columns, values)

    def solve(self) -> LinearSolution | None:
        """Return the solution; None if the program has no solution.

        Raises:
            ArithmeticError: the solver gave up.
        """
        from highspy import HighsModelStatus

        infeasible = HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible
        status = self._run()
        if status not in (HighsModelStatus.kOptimal, *infeasible):  # the last solution led nowhere: again
            self._solver.clearSolver()
            status = self._run()
        if status in infeasible:
            return None
        if status != HighsModelStatus.kOptimal:
            raise ArithmeticError(f"a linear program was not solved: {self._solver.modelStatusToString(status)}")
        solution = self._solver.getSolution()
        return LinearSolution(np.array(solution.col_value), np.array(solution.row_dual))

    def _run(self) -> HighsModelStatus:
        self._solver.run()
        return self._solver.getModelStatus()


def _quiet_solver() -> Highs:
    from highspy import Highs  # small chains do without

    class QuietHighs(Highs):
        def enableCallbacks(self) -> None:
            """Enable none: `Highs()` does, and prints the name of the solver then."""

    solver = QuietHighs()
    solver.silent()
    return solver


def _sparse(table: Floats) -> tuple[int, Integers, Integers, Floats]:
    """Return the figures of a table (rows, columns) that are not zero, as HiGHS takes them: how many there are, where
    each row starts, and their columns and values."""
    rows, columns = np.nonzero(table)
    return len(rows), np.searchsorted(rows, np.arange(len(table))), columns, table[rows, columns]


class MatrixGame:
    """A matrix game, to which choices of both players may be added. The rows want the payoff to be large.

    The rows' optimal mixture maximises the least column (von Neumann, 1928): a linear program, whose dual is the
    columns'.
    """

    def __init__(self, payoff: Floats) -> None:
        """``payoff`` is (rows, columns)."""
        columns = payoff.shape[1]
        self._scale = float(np.abs(payoff).max()) or 1.0
        self._program = LinearProgram()
        self._program.add_variables(np.array([-1.0]), np.zeros((0, 1)), lowest=-np.inf)  # the value, to be maximised
        self._program.add_rows(np.zeros((1, 1)), np.ones(1), np.ones(1))  # the sum of the mixture
        self._program.add_rows(np.ones((columns, 1)), np.full(columns, -np.inf), np.zeros(columns))
        for row in payoff:
            self.add_row(row)

    def add_row(self, payoff: Floats) -> None:
        """Add a choice of the rows with this payoff (columns,)."""
        self._program.add_variables(np.zeros(1), np.append(1.0, -payoff / self._scale)[:, None])

    def add_column(self, payoff: Floats) -> None:
        """Add a choice of the columns with this payoff (rows,)."""
        self._program.add_rows(np.append(1.0, -payoff / self._scale)[None], np.full(1, -np.inf), np.zeros(1))

    def equilibrium(self) -> tuple[Floats, Floats]:
        """Return the optimal mixtures of the rows and of the columns."""
        solution = self._program.solve()
        assert solution is not None  # every game has a value
        return _normalised(solution.values[1:]), _normalised(-solution.duals[1:])


def _normalised(weights: Floats) -> Floats:
    weights = weights.clip(min=0.0)
    weights[weights < _TINY * weights.max()] = 0.0
    mixture: Floats = weights / weights.sum()
    return mixture


# ---- fractional stages -----------------------------------------------------------------------------------------------
# A lower bound for all cuts and options of a chain: stages of any parts of its segments.


_ROUNDS = 24  # of solving the program, then adding linear bounds that its solution exceeds
_ROWS = 16  # of the linear bounds that are exceeded the most, which a round adds
_EXCEEDS = 1e-3  # part of a bound
_EXACT = 1e-6  # of the solution of a linear program


class FractionalStages:
    """Stages that may have any parts of any segments, each part with any option that the stage may have.

    Cuts and options are one way to fill them, so none takes less than the fastest way. As a makespan, and what a rank
    needs, is the largest of linear bounds, a linear program finds it. Segments that have the same costs to choose from
    are one variable for each stage and cost. The first segment is in the first stage, and the last one in the last.

    Args:
        options: the costs of the segments with each option.
        allowed: the options that stages may have: (stages, options).
        makespan, memory: of stages with these options.
    """

    def __init__(
        self,
        options: Sequence[Sequence[SegmentCost]],
        allowed: Booleans,
        makespan: Makespan,
        memory: MemoryNeed,
    ) -> None:
        self._makespan, self._memory = makespan, memory
        allowed_sets, inverse = np.unique(allowed, axis=0, return_inverse=True)
        set_of_stage = inverse.reshape(-1)  # numpy 2.0 returns a column
        kinds: dict[tuple[str, tuple[frozenset[tuple[float, ...]], ...]], list[int]] = {}
        for number, costs in enumerate(zip(*options, strict=True)):
            place = {0: "first", len(options[0]) - 1: "last"}.get(number, "between")
            figures = [*map(quantities_of, costs)]
            choices_of_sets = tuple(frozenset(itertools.compress(figures, row)) for row in allowed_sets)
            kinds.setdefault((place, choices_of_sets), []).append(number)
        every = range(memory.stages)
        stages = {"first": every[:1], "between": every, "last": every[-1:]}
        self._counts = np.array([len(numbers) for numbers in kinds.values()])
        choices = [
            (kind, stage, cost)
            for kind, (place, choices_of_sets) in enumerate(kinds)
            for stage in stages[place]
            for cost in sorted(choices_of_sets[set_of_stage[stage]])
        ]
        self._kinds, self._stage, costs_of = (np.array(column) for column in zip(*choices, strict=True))
        self._costs: Floats = costs_of.T  # (quantities, variables)

    def fit(self) -> bool:
        """Return whether any stages fit into the memory, however long they take."""
        program = self._program_of_shares()
        for solution in _rounds(program):
            if solution is None:
                return False
            table, most = self._exceeded_memory(solution.values[:-1])
            if not len(table):
                break
            rows = np.column_stack([table, np.zeros(len(table))])
            program.add_rows(rows, np.full(len(table), -np.inf), most)
        return True

    def least_makespan(self, enough: float = math.inf) -> float:
        """Return seconds that no cuts and options go below; infinite if none fit. It is not made tighter than
        ``enough``."""
        pool, constants = self._table([*self._makespan.initial_bounds(), *self._makespan.path_bounds()])
        even = self._counts[self._kinds] / np.bincount(self._kinds)[self._kinds]
        scale = float((pool @ even + constants).max())  # so that no figure is far from 1
        if not scale:
            return 0.0
        program = self._program_of_shares()

        def add(table: Floats, makespan: float, most: Floats) -> None:
            """Add rows ``table`` @ shares + ``makespan`` × the makespan, the last variable, ≤ ``most``."""
            if len(table):
                rows = np.column_stack([table, np.full(len(table), makespan)])
                program.add_rows(rows / scale, np.full(len(table), -np.inf), most / scale)

        add(pool[: self._memory.ranks], -scale, -constants[: self._memory.ranks])
        least = 0.0
        for solution in _rounds(program):
            if solution is None:
                return math.inf
            least, shares = scale * float(solution.values[-1]), solution.values[:-1]
            if least >= enough:
                break
            values = pool @ shares + constants
            longest = np.argsort(-values)[:_ROWS]
            longest = longest[values[longest] > least * (1 + _EXCEEDS)]
            new_rows, more_constants = pool[longest], constants[longest]
            if not len(longest):
                new_rows, more_constants = self._table([self._makespan.longest_path(self._stages_of(shares))])
                slower = new_rows @ shares + more_constants > least * (1 + _EXCEEDS)
                new_rows, more_constants = new_rows[slower], more_constants[slower]
            needs, most = self._exceeded_memory(shares)
            if not len(new_rows) and not len(needs):
                break
            add(new_rows, -scale, -more_constants)
            add(scale * needs, 0.0, scale * most)
        return least * (1 - _EXACT)

    def _program_of_shares(self) -> LinearProgram:
        """Return a program that minimizes its last variable, the makespan. The others are shares of the segments, which
        add up to whole segments."""
        variables = len(self._kinds)
        program = LinearProgram()
        program.add_variables(np.append(np.zeros(variables), 1.0), np.zeros((0, variables + 1)))
        parts = np.arange(len(self._counts))[:, None] == np.append(self._kinds, -1)
        program.add_rows(parts.astype(np.float64), self._counts, self._counts)
        return program

    def _exceeded_memory(self, shares: Floats) -> tuple[Floats, Floats]:
        """Return the linear bounds of memory that shares exceed, as parts of the limit: their rows, and the largest
        value of each."""
        limit = self._memory.limit
        needs, constants = self._table(self._memory.tightest_bounds(self._stages_of(shares)))
        short = needs @ shares + constants > limit * (1 + _EXCEEDS)
        return needs[short] / limit, 1 - constants[short] / limit

    def _table(self, bounds: Sequence[LinearBound]) -> tuple[Floats, Floats]:
        """Return what each variable adds to linear bounds, and their constants: (bounds, variables), (bounds,)."""
        rows = [np.einsum("qv,qv->v", bound.weights[:, self._stage], self._costs) for bound in bounds]
        return np.array(rows), np.array([bound.constant for bound in bounds])

    def _stages_of(self, shares: Floats) -> Floats:
        """Return the quantities of stages: (quantities, stages)."""
        return np.array([np.bincount(self._stage, row, self._memory.stages) for row in self._costs * shares])


def _rounds(program: LinearProgram) -> Iterator[LinearSolution | None]:
    """Solve a program, to which the caller adds rows after each solution; yield None if it has no solution.

    It ends early if the solver gives up.
    """
    for _ in range(_ROUNDS):
        try:
            solution = program.solve()
        except ArithmeticError:
            return
        yield solution
