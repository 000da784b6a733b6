"""The plans of a cluster as data: candidates, what was found for them, and the comparison of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipegraph.planner.joint_plan.layout import Layout
from pipegraph.planner.plan_options import StagedCosts
from pipegraph.planner.solver.option_search import OptionSolution
from pipegraph.recompute import Recompute


@dataclass(frozen=True)
class JointCandidate:
    """One plan of the space, without its cuts and what is computed again.

    ``resident`` is how many of a rank's ``chunks`` stages are whole at a time, if ranks along dp_shard divide their
    parameters; None for all.
    """

    layout: Layout
    schedule: str
    chunks: int
    rows: int
    microbatches: int
    resident: int | None = None

    @property
    def stages(self) -> int:
        """How many stages a pipeline has."""
        return self.layout.pp * self.chunks

    @property
    def state_factor(self) -> float:
        """How many times a rank holds the parameters of its stages that have a gradient."""
        resharded = 0.0 if self.resident is None else 1 - self.resident / self.chunks
        return self.layout.state_factor - resharded


@dataclass(frozen=True)
class JointChoice:
    """A candidate with the best cuts and choices that were found.

    Attributes:
        step: seconds, with what gathering parameters and reducing gradients adds.
        lower_bound: no cuts and choices of the candidate have less.
    """

    candidate: JointCandidate
    solution: OptionSolution
    step: float
    lower_bound: float
    recompute: tuple[Recompute, ...]
    costs: StagedCosts = field(repr=False)

    @property
    def peak(self) -> int:
        """Bytes that the fullest rank needs."""
        return max(self.solution.memory)


@dataclass(frozen=True)
class Neighbour:
    """What the best plan would cost with another value of one axis; ``choice`` is None if nothing fits or exists."""

    axis: str
    value: str
    choice: JointChoice | None


@dataclass(frozen=True)
class JointComparison:
    """The plans worth a choice.

    Attributes:
        choices: fastest first: none needs more memory and more time than another one.
        considered: how many candidates the space has.
        searched: for how many cuts were searched; bounds rule out the others.
        lower_bound: no plan of the space takes less.
        neighbours: of the best one.
    """

    choices: tuple[JointChoice, ...]
    considered: int
    searched: int
    lower_bound: float
    neighbours: tuple[Neighbour, ...]

    @property
    def best(self) -> JointChoice:
        """The fastest."""
        return self.choices[0]

    @property
    def gap(self) -> float:
        """The part of the best step by which any plan of the space can be shorter, at most."""
        return max(0.0, 1 - self.lower_bound / self.best.step)


def pareto_front(choices: Sequence[JointChoice]) -> tuple[JointChoice, ...]:
    """Return the choices of which no other one is as fast and needs as little memory, the fastest first."""
    front: list[JointChoice] = []
    for choice in sorted(choices, key=lambda joint_choice: (joint_choice.step, joint_choice.peak)):
        if not front or choice.peak < front[-1].peak:
            front.append(choice)
    return tuple(front)
