"""Matrix games that grow: the linear programs behind the bound."""

from __future__ import annotations

import numpy as np

from pipegraph.planner.solver.prefix_sums import Floats

_TINY = 1e-10
_PIVOTS = 50  # per row and column: far more than the simplex method takes


class Game:
    """A game in which a player of rows receives ``payoff`` (rows, columns) from a player of columns.

    The best mixture of rows is that whose least column is largest, the best of columns that whose largest row is least
    (von Neumann, 1928). Both come from a simplex tableau of: maximise Σu where A·u ≤ 1 and u ≥ 0, for A > 0. It has the
    columns of the game, one slack for each row, and the right side; its last row is that of the figure. A row or column
    is added to the tableau as it stands, whose solution then is a few pivots away. Rounding, or pivots that come to no
    end, can make mixtures that are not the best, but nothing else.
    """

    def __init__(self, payoff: Floats) -> None:
        rows, columns = payoff.shape
        self._scale = float(np.abs(payoff).max()) or 1.0
        self._at: list[int] = list(range(columns))  # where the columns stand in the tableau
        self._slacks = list(range(columns, columns + rows))
        self._basis = list(self._slacks)
        self._tableau = np.zeros((rows + 1, columns + rows + 1))
        self._tableau[:rows, :columns] = self._positive(payoff)
        self._tableau[:rows, columns:-1] = np.eye(rows)
        self._tableau[:rows, -1] = 1.0
        self._tableau[rows, :columns] = -1.0
        self._improve()

    def add_row(self, payoff: Floats) -> None:
        """Of each column, what the new row receives."""
        rows, width = len(self._basis), self._tableau.shape[1]
        row = np.zeros(width)
        row[self._at], row[-1] = self._positive(payoff), 1.0
        row -= row[self._basis] @ self._tableau[:rows]
        tableau = np.insert(self._tableau, rows, row, axis=0)
        self._tableau = np.insert(tableau, width - 1, 0.0, axis=1)
        self._tableau[rows, width - 1] = 1.0
        self._slacks.append(width - 1)
        self._basis.append(width - 1)
        self._repair()

    def add_column(self, payoff: Floats) -> None:
        """Of each row, what it receives from the new column."""
        column = self._tableau[:, self._slacks] @ self._positive(payoff)
        column[-1] -= 1.0
        width = self._tableau.shape[1]
        self._tableau = np.insert(self._tableau, width - 1, column, axis=1)
        self._at.append(width - 1)
        self._improve()

    def mixtures(self) -> tuple[Floats, Floats]:
        """The best of the rows and of the columns."""
        solution = np.zeros(self._tableau.shape[1])
        solution[self._basis] = self._tableau[:-1, -1]
        return _mixture(self._tableau[-1, self._slacks]), _mixture(solution[self._at])

    def _positive(self, payoff: Floats) -> Floats:
        return payoff / self._scale + 1.0

    def _improve(self) -> None:
        """The simplex method."""
        for _ in range(_PIVOTS * sum(self._tableau.shape)):
            entering = int(self._tableau[-1, :-1].argmin())
            pivots = self._tableau[:-1, entering]
            if self._tableau[-1, entering] > -_TINY or not (pivots > _TINY).any():
                return
            ratios = np.full(len(pivots), np.inf)
            np.divide(self._tableau[:-1, -1], pivots, out=ratios, where=pivots > _TINY)
            self._pivot(int(ratios.argmin()), entering)

    def _repair(self) -> None:
        """The dual simplex method."""
        for _ in range(_PIVOTS * sum(self._tableau.shape)):
            leaving = int(self._tableau[:-1, -1].argmin())
            pivots = self._tableau[leaving, :-1]
            if self._tableau[leaving, -1] > -_TINY or not (pivots < -_TINY).any():
                return
            ratios = np.full(len(pivots), np.inf)
            np.divide(self._tableau[-1, :-1], -pivots, out=ratios, where=pivots < -_TINY)
            self._pivot(leaving, int(ratios.argmin()))

    def _pivot(self, leaving: int, entering: int) -> None:
        self._tableau[leaving] /= self._tableau[leaving, entering]
        others = self._tableau[:, entering].copy()
        others[leaving] = 0.0
        self._tableau -= others[:, None] * self._tableau[leaving]
        self._basis[leaving] = entering


def _mixture(weights: Floats) -> Floats:
    weights = weights.clip(min=0.0)
    weights[weights < _TINY * weights.max()] = 0.0
    mixture: Floats = weights / weights.sum()
    return mixture
