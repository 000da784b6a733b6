"""The plans of a cluster as data: candidates, what was found for them, and the comparison of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipegraph.cost.hardware import ALL_REDUCE, GATHER, REDUCE, Hardware
from pipegraph.planner.plan_options import StagedCosts
from pipegraph.planner.solver.solve import Solution
from pipegraph.recompute import Recompute

# ---- layout ----------------------------------------------------------------------------------------------------------
# How a cluster is divided: the lengths of the dimensions of its mesh.


_WHOLE_STATE = 4.0  # a parameter, its gradient and AdamW's two moments
_GATHERED = 2.0  # of a sharded stage, the whole parameters and the gradients that add up before they are reduced
_FEW_NUMBERS = 64.0  # bytes


@dataclass(frozen=True)
class Layout:
    """The mesh ``pp × dp_replicate × dp_shard × tp``; ranks along the last are neighbours."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def copies(self) -> int:
        """How many pipelines share the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def stride(self) -> int:
        """How far apart the ranks of one pipeline are numbered."""
        return self.copies * self.tp

    @property
    def state_factor(self) -> float:
        """How many times a rank holds the parameters of its stages that have a gradient.

        Along dp_shard each rank keeps its part of parameters, gradients and moments; during a step it also holds the
        gathered parameters of its stages, and their gradients until these are reduced.
        """
        return _WHOLE_STATE if self.dp_shard == 1 else _GATHERED + _WHOLE_STATE / self.dp_shard

    def gather_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the seconds to gather the parameters of a stage, ``size`` bytes, and to copy them to their places."""
        if self.dp_shard == 1:
            return 0.0
        return hardware.links.collective_seconds(GATHER, size, self.dp_shard, self.tp) + _copied(hardware, size)

    def reduce_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the seconds to reduce the gradients of a stage, ``size`` bytes, which are copied together first."""
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
        return f"pp {self.pp} × dp_replicate {self.dp_replicate} × dp_shard {self.dp_shard} × tp {self.tp}"


def layouts(devices: int, most_stages: int, most_tp: int) -> Iterator[Layout]:
    """Yield every layout of the devices with at most ``most_stages`` ranks along pp and ``most_tp`` ranks along tp."""
    for tp in _divisors(devices):
        for pp in _divisors(devices // tp):
            copies = devices // tp // pp
            if tp <= most_tp and pp <= most_stages:
                yield from (Layout(pp, copies // shard, shard, tp) for shard in _divisors(copies))


def _copied(hardware: Hardware, size: float) -> float:
    """Return the seconds to copy ``size`` bytes."""
    return 2 * size / hardware.bytes_per_second(2 * size)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# ---- choices ---------------------------------------------------------------------------------------------------------


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
    solution: Solution
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
