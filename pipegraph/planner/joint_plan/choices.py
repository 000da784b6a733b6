"""The plans of a cluster as data: candidates, what was found for them, and the comparison of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipegraph.cost import MemoryFactors
from pipegraph.cost.hardware import ALL_REDUCE, GATHER, REDUCE, Hardware
from pipegraph.planner.plan_options import StagedCosts
from pipegraph.planner.solver.solve import Solution
from pipegraph.recompute import Recompute

# ---- layout ----------------------------------------------------------------------------------------------------------
# How a cluster is divided: the lengths of the dimensions of its mesh.


_FEW_NUMBERS = 64.0  # bytes


@dataclass(frozen=True)
class Layout:
    """The mesh ``pp × dp_replicate × dp_shard × tp``; ranks along the last are neighbours.

    ``zero1`` says that ranks along dp_replicate divide the optimizer's state.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    zero1: bool = False

    @property
    def copies(self) -> int:
        """How many pipelines share the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def stride(self) -> int:
        """How far apart the ranks of one pipeline are numbered."""
        return self.copies * self.tp

    def factors(self, alone: MemoryFactors) -> MemoryFactors:
        """Return how many times a rank holds each part of its stages.

        Along dp_shard each rank keeps its part of parameters, gradients and optimizer state (ZeRO-3); during a step it
        also holds the gathered parameters of its stages, and their gradients until these are reduced. With ``zero1``
        the ranks along dp_replicate divide the optimizer's state (ZeRO-1; Rajbhandari et al., arXiv:1910.02054).

        Args:
            alone: the factors if no other rank has the stages.
        """
        optimizer = alone.optimizer / (self.dp_shard * (self.dp_replicate if self.zero1 else 1))
        if self.dp_shard == 1:
            return alone._replace(optimizer=optimizer)
        return alone._replace(
            parameters=alone.parameters / self.dp_shard,
            copies=max(1.0, alone.copies),
            gradients=alone.gradients * (1 + 1 / self.dp_shard),
            optimizer=optimizer,
        )

    def divided(self, dp_shard: int, zero1: bool) -> Layout:
        """Return the layout with another division of its copies."""
        replicas = self.copies // dp_shard
        return replace(self, dp_replicate=replicas, dp_shard=dp_shard, zero1=zero1 and replicas > 1)

    def gather_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the seconds to gather the parameters of a stage, ``size`` bytes, and to copy them to their places."""
        if self.dp_shard == 1:
            return 0.0
        return hardware.links.collective_seconds(GATHER, size, self.dp_shard, self.tp) + _copied(hardware, size)

    def reduce_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the seconds to reduce the gradients of a stage, ``size`` bytes, which are copied together first.

        With ``zero1`` the gradients are scattered and the new parameters gathered, which is what an all-reduce does.
        """
        if self.copies == 1:
            return 0.0
        scatter = hardware.links.collective_seconds(REDUCE, size, self.dp_shard, self.tp)
        part, stride = size / self.dp_shard, self.dp_shard * self.tp
        reduction = hardware.links.collective_seconds(ALL_REDUCE, part, self.dp_replicate, stride)
        return _copied(hardware, size) + scatter + reduction

    def agreement_seconds(self, hardware: Hardware) -> float:
        """Return what the copies take to agree on the shares of a batch before a step, and to add up its loss after it:
        each time they reduce a few numbers."""
        return 2 * hardware.links.collective_seconds(ALL_REDUCE, _FEW_NUMBERS, self.copies, self.tp)

    def __str__(self) -> str:
        mesh = f"pp {self.pp} × dp_replicate {self.dp_replicate} × dp_shard {self.dp_shard} × tp {self.tp}"
        return f"{mesh}, ZeRO-1" if self.zero1 else mesh


def layouts(devices: int, most_stages: int, most_tp: int, zero1: bool = False) -> Iterator[Layout]:
    """Yield every layout of the devices with at most ``most_stages`` ranks along pp and ``most_tp`` ranks along tp.

    With ``zero1``, ranks along dp_replicate divide the optimizer's state.
    """
    for tp in divisors(devices):
        for pp in divisors(devices // tp):
            copies = devices // tp // pp
            if tp <= most_tp and pp <= most_stages:
                yield from (Layout(pp, copies, 1, tp).divided(shard, zero1) for shard in divisors(copies))


def _copied(hardware: Hardware, size: float) -> float:
    """Return the seconds to copy ``size`` bytes."""
    return 2 * size / hardware.bytes_per_second(2 * size)


def divisors(number: int) -> list[int]:
    """Return the numbers that divide a number, in order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# ---- choices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JointCandidate:
    """One plan of the space, without its cuts and what is computed again.

    ``resident`` is how many of a rank's ``chunks`` stages are whole at a time, if ranks along dp_shard divide their
    parameters; None for all. ``least_factors`` stand in the place of what ranks hold, for bounds.
    """

    layout: Layout
    schedule: str
    chunks: int
    rows: int
    microbatches: int
    resident: int | None = None
    least_factors: MemoryFactors | None = None

    @property
    def stages(self) -> int:
        """How many stages a pipeline has."""
        return self.layout.pp * self.chunks

    def factors(self, alone: MemoryFactors) -> MemoryFactors:
        """Return how many times a rank holds each part of its stages; ``alone`` as for `Layout.factors`."""
        if self.least_factors is not None:
            return self.least_factors
        factors = self.layout.factors(alone)
        if self.resident is None:
            return factors
        return factors._replace(copies=factors.copies * self.resident / self.chunks)


@dataclass(frozen=True)
class JointChoice:
    """A candidate with the best cuts and choices that were found.

    Attributes:
        step: seconds, with what gathering parameters and reducing gradients adds.
        lower_bound: no cuts and choices of the candidate have less.
    """

    candidate: JointCandidate
    solution: Solution
    step: float
    lower_bound: float
    recompute: tuple[Recompute, ...]
    costs: StagedCosts = field(repr=False)

    @property
    def has_named_order(self) -> bool:
        """Whether its actions are in the order of the candidate's schedule; else in one that `search` found."""
        return self.solution.schedule.name == self.candidate.schedule

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
