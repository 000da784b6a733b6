"""The best plan over all axes at once, of small random problems whose every plan is simulated.

The axes: precision and ZeRO-1, schedules and their placements, cuts, what each stage computes again, and the device,
the memory and the links of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from random import Random

import pytest

from pipegraph.cost import MemoryFactors, SegmentCost
from pipegraph.cost.hardware import Link
from pipegraph.cost.training_state import PRECISIONS, TrainingState
from pipegraph.planner.solver import cut_search
from pipegraph.planner.solver.solve import MemoryShortage, Problem
from pipegraph.schedule import Schedule, build
from tests.planner.brute_force import every_cut, memory
from tests.planner.test_unequal_devices import linked_makespan
from tests.slow import cases

SCHEDULES = {1: ("1f1b", "gpipe", "zb-h1"), 2: ("interleaved-1f1b", "zb-v")}
"""By the stages of a rank. Those of two differ in their placement: a loop and a V."""


@dataclass(frozen=True)
class Axes:
    """A random problem.

    Attributes:
        options: the costs of the segments on each device (of two) with each recompute (of two).
        devices: of the ranks.
        links: by the pair of ranks.
        limits: bytes of each rank.
        factors: how many times a rank holds each part of its state.
        schedules: to compare.
    """

    options: Sequence[Sequence[Sequence[SegmentCost]]]
    devices: Sequence[int]
    links: dict[tuple[int, int], Link]
    limits: Sequence[float]
    factors: MemoryFactors
    schedules: Sequence[Schedule]

    @property
    def flat(self) -> list[Sequence[SegmentCost]]:
        """The options of all devices."""
        return [costs for device in self.options for costs in device]

    def allowed(self, schedule: Schedule) -> list[list[int]]:
        """The options in `flat` of each stage: those of its rank's device."""
        return [[2 * self.devices[rank], 2 * self.devices[rank] + 1] for rank in schedule.placement]

    def plans(self, schedule: Schedule) -> Iterator[tuple[float, list[float]]]:
        """Yield the seconds of every plan with a schedule, and the bytes of its ranks."""
        flat = self.flat
        for cuts in every_cut(len(flat[0]), schedule.stages):
            edges = [*pairwise((0, *cuts, len(flat[0])))]
            for chosen in product(*self.allowed(schedule)):
                costs = [flat[option][at] for option, edge in zip(chosen, edges, strict=True) for at in range(*edge)]
                needs = memory(costs, cuts, schedule, self.factors)
                yield linked_makespan(costs, cuts, schedule, self.links), needs


def random_axes(random: Random) -> Axes:
    ranks = random.choice([2, 2, 3])
    chunks = (1, 2) if ranks == 2 else (1,)
    names = [(name, count) for count in chunks for name in SCHEDULES[count]]
    microbatches = ranks * random.choice([2, 3])
    schedules = [build(name, ranks, microbatches, count) for name, count in random.sample(names, 3)]
    base = [_segment(random) for _ in range(random.randint(max(schedule.stages for schedule in schedules), 6))]
    slower, again = random.choice([1.0, 1.5, 3.0]), random.choice([1.0, 1.5])
    options = [
        [[_changed(cost, device, 1.0, 1) for cost in base], [_changed(cost, device, again, 3) for cost in base]]
        for device in (1.0, slower)
    ]
    pairs = [(rank, other) for rank in range(ranks) for other in range(ranks) if rank != other]
    links = {pair: Link(random.choice([0.0, 0.5]), random.choice([5.0, 50.0]), "") for pair in pairs}
    factors = TrainingState(random.choice([*PRECISIONS]), random.choice(["adamw", "sgd"])).factors
    factors = factors._replace(optimizer=random.choice([1.0, 0.5]), allowance=random.choice([0.0, 0.25]))
    devices = [random.randrange(2) for _ in range(ranks)]
    axes = Axes(options, devices, links, [math.inf] * ranks, factors, schedules)
    needs = [needs for schedule in schedules for _, needs in axes.plans(schedule)]
    low, high = ([choose(need[rank] for need in needs) for rank in range(ranks)] for choose in (min, max))
    share = random.choice([0.1, 0.4, 1.0])
    return replace(axes, limits=[least + share * (most - least) for least, most in zip(low, high, strict=True)])


def _segment(random: Random) -> SegmentCost:
    return SegmentCost(
        *(float(random.randint(0, 9)) for _ in range(3)),
        random.randint(0, 20),
        random.randint(0, 20),
        random.randint(0, 9),
        optimizer_bytes=random.randint(0, 36),
    )


def _changed(cost: SegmentCost, slower: float, again: float, leaner: int) -> SegmentCost:
    """A segment on a slower device, whose backward takes longer and whose forward saves less."""
    return replace(
        cost,
        forward=cost.forward * slower,
        input_grad=cost.input_grad * slower * again,
        weight_grad=cost.weight_grad * slower,
        saved_bytes=cost.saved_bytes // leaner,
    )


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("seed", cases(range(200), slow=range(8, 200)))
def test_the_best_of_all_plans_is_found(seed: int, searched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the cuts are too many to value all of them."""
    if searched:
        monkeypatch.setattr(cut_search, "_ALL_STEPS", 0)
    axes = random_axes(Random(seed))
    best, found, bound = math.inf, math.inf, math.inf
    for schedule in axes.schedules:
        fitting = [
            value
            for value, needs in axes.plans(schedule)
            if all(need <= limit for need, limit in zip(needs, axes.limits, strict=True))
        ]
        least = min(fitting, default=math.inf)
        problem = Problem(
            axes.flat,
            schedule,
            memory_bytes=axes.limits,
            link=lambda rank, other: axes.links[rank, other],
            allowed=axes.allowed(schedule),
            factors=axes.factors,
        )
        assert problem.fractional_bound() <= least * (1 + 1e-9)
        assert problem.may_fit or not fitting
        try:
            solution = problem.solve(())
        except MemoryShortage:
            assert not fitting
            continue
        assert all(need <= math.ceil(limit) for need, limit in zip(solution.memory, axes.limits, strict=True))
        assert solution.lower_bound <= least * (1 + 1e-9) <= solution.value * (1 + 2e-9)
        best, found, bound = min(best, least), min(found, solution.value), min(bound, solution.lower_bound)
    assert bound <= best * (1 + 1e-9) <= found * (1 + 2e-9)
    assert found == pytest.approx(best, rel=1e-9)
