"""Linear programs that grow."""

from __future__ import annotations

import numpy as np
import pytest

from pipegraph.planner.solver.linear_program import LinearProgram


def test_a_program_is_solved_again_with_more_rows_and_variables(capfd: pytest.CaptureFixture[str]) -> None:
    """x + y ≥ 2 costs 2 x + 3 y; then x ≤ 1; then z, which costs less than y and is a part of the first row."""
    program = LinearProgram()
    program.add_variables(np.array([2.0, 3.0]), np.zeros((0, 2)))
    program.add_rows(np.array([[1.0, 1.0]]), np.array([2.0]), np.array([np.inf]))
    first = program.solve()
    assert first is not None and first.values.tolist() == [2, 0] and first.duals.tolist() == [2]
    program.add_rows(np.array([[1.0, 0.0]]), np.array([-np.inf]), np.array([1.0]))
    second = program.solve()
    assert second is not None and second.values.tolist() == [1, 1] and second.duals.tolist() == [3, -1]
    program.add_variables(np.array([2.5]), np.array([[1.0], [0.0]]))
    third = program.solve()
    assert third is not None and third.values.tolist() == [1, 0, 1] and third.duals.tolist() == [2.5, -0.5]
    program.add_rows(np.array([[1.0, 1.0, 1.0]]), np.array([-np.inf]), np.array([1.0]))
    assert program.solve() is None
    assert capfd.readouterr().out == ""  # the solver's name, which it likes to print


def test_variables_may_be_below_zero() -> None:
    program = LinearProgram()
    program.add_variables(np.array([1.0]), np.zeros((0, 1)), lowest=-np.inf)
    program.add_rows(np.array([[1.0]]), np.array([-3.0]), np.array([np.inf]))
    solution = program.solve()
    assert solution is not None and solution.values.tolist() == [-3]
