"""Linear programs that grow, and are solved again from where the last solution was; and the solution of a matrix game
by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipegraph.planner.solver.prefix_sums import Floats, Integers

if TYPE_CHECKING:
    from highspy import Highs, HighsModelStatus


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
