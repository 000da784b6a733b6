"""Floor 4: from split points to a plan."""

from __future__ import annotations

from pipegraph.planner.solver.solve import Alternative, Solution, solve

__all__ = ["Alternative", "Solution", "solve"]
