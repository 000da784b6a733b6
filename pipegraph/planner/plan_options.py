"""The arguments of a plan, and the costs of segments and stages that they lead to."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from pipegraph.arguments import argument
from pipegraph.cost import MemoryFactors, SegmentCost
from pipegraph.cost.balance import AUTO, TIMED, parse_balance
from pipegraph.cost.block_times import Cache, MeasureOptions
from pipegraph.cost.hardware import Hardware, Link
from pipegraph.cost.measured_layers import is_at_hand
from pipegraph.cost.model_output import LossOf
from pipegraph.cost.price import PricedModel, price
from pipegraph.cost.rank_profiles import RankProfiles
from pipegraph.cost.training_state import OWN_DTYPES, TrainingState
from pipegraph.errors import ArgumentError, PlanError
from pipegraph.graph.captured import Captured, StateEntry
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.cpu.process import threads_per_rank
from pipegraph.planner.solver.solve import Solution, solve
from pipegraph.planner.solver.solve_arguments import check_numbers, memory_of_ranks, resolve_schedule
from pipegraph.progress import report_progress
from pipegraph.recompute import EVERYWHERE, Recompute, describe_stages
from pipegraph.schedule import Schedule
from pipegraph.schedule.recipes import find_recipe
from pipegraph.units import bytes_option, format_bytes, format_number_of

_GPU_ALLOWANCE = 0.05
"""The part of what comes and goes in a step that the allocator of a GPU cannot use, because its blocks lie between
others and are rounded up. Allocations of a CPU return their pages."""


class ChainCosts:
    """The costs of the segments and stages of a priced model.

    A figure that is not a time, such as a number of parameters, is the same for F, I and W. It counts once, as F.
    """

    def __init__(self, priced: PricedModel) -> None:
        self.priced = priced
        self.segments = tuple(self._counted_once(cost) for cost in priced.costs)
        self._stages: dict[tuple[int, int], SegmentCost] = {}

    def stages(self, cuts: Sequence[int]) -> tuple[SegmentCost, ...]:
        """Return the exact costs of the stages that cuts make.

        A sum over segments is not exact: it leaves out what a cut takes, counts twice what two segments keep, and
        counts a tied weight in one stage only.
        """
        return tuple(self.stage(start, stop) for start, stop in pairwise([0, *cuts, len(self.segments)]))

    def stage(self, start: int, stop: int) -> SegmentCost:
        """Return the exact cost of the segments ``start`` … ``stop`` − 1 as one stage."""
        if (start, stop) not in self._stages:
            self._stages[start, stop] = self._counted_once(self.priced.stage(start, stop))
        return self._stages[start, stop]

    def _counted_once(self, cost: SegmentCost) -> SegmentCost:
        return cost if self.priced.unit in ("s", "FLOP") else replace(cost, input_grad=0.0, weight_grad=0.0)


class StagedCosts(ChainCosts):
    """The costs of stages if each has its own recompute; ``of_stages`` has the costs of the chain for each stage."""

    def __init__(self, of_stages: Sequence[ChainCosts]) -> None:
        super().__init__(of_stages[0].priced)
        self._of_stages = tuple(of_stages)

    def stages(self, cuts: Sequence[int]) -> tuple[SegmentCost, ...]:
        edges = pairwise([0, *cuts, len(self.segments)])
        return tuple(costs.stage(*edge) for costs, edge in zip(self._of_stages, edges, strict=True))


@dataclass(frozen=True)
class PlanOptions:
    """The arguments of `pipegraph.plan` without the model and its cuts.

    ``recompute`` is one for all stages, or one for each. The ranks of the pipeline are numbered ``stride`` apart.
    ``factors_of_layout`` is what a rank holds of its stages if other ranks share them. ``hardware`` is the profile of
    all ranks, or ``rank_profiles`` has one for each.

    Raises ArgumentError for an impossible balance or number, or a precision that the hardware does not have, and
    ScheduleError for an unknown schedule.
    """

    balance: str = "time"
    schedule: str | Schedule = "1f1b"
    microbatches: int = 8
    ranks: int | None = None
    memory_bytes: float | Sequence[float] | None = None
    hardware: Hardware = field(default_factory=lambda: Hardware.load("cpu"))
    recompute: Recompute | tuple[Recompute, ...] = EVERYWHERE
    loss: tuple[LossOf, Any] | None = None
    training: TrainingState = OWN_DTYPES
    factors_of_layout: MemoryFactors | None = None
    effort: float = 1.0
    setting: MeasureOptions | None = None
    cache: Cache | None = None
    stride: int = 1
    rank_profiles: RankProfiles | None = None

    def __post_init__(self) -> None:
        parse_balance(self.balance)
        check_number("microbatches", self.microbatches, 8)
        if self.ranks is not None:
            check_number("ranks", self.ranks, 4)
        check_numbers(self.effort)
        for profile in (self.hardware,) if self.rank_profiles is None else self.rank_profiles.distinct:
            self._check_precision(profile)
        if self.rank_profiles is not None and self.balance not in ("time", AUTO):
            raise ArgumentError(
                f"{argument('balance', self.balance)} is the same on every device, and hardware has "
                f"{self.rank_profiles.name}.",
                f"{argument('balance', 'time')}, or one profile for all ranks.",
            )
        if not isinstance(self.schedule, Schedule):
            find_recipe(self.schedule)

    def _check_precision(self, profile: Hardware) -> None:
        """Raise ArgumentError if a profile has no rate for the products of the precision."""
        products = "" if self.training.dtypes is None else self.training.dtypes.products
        if products and products not in profile.peak_flops:
            raise ArgumentError(
                f"The profile {profile.name} has no rate for {products}, in which precision "
                f"{self.training.precision} multiplies. It has: {', '.join(profile.peak_flops)}.",
                f"{argument('precision', 'bf16')}, or {argument('hardware', 'h100')}.",
            )

    @property
    def recompute_text(self) -> str:
        """What is computed again, in a line."""
        return describe_stages((self.recompute,) if isinstance(self.recompute, Recompute) else self.recompute)

    def on_ranks(self, ranks: int) -> PlanOptions:
        """Return the same options for ``ranks`` ranks: a rank is measured with the threads that `pipegraph run` gives
        it, and ``auto`` is ``time`` if the device of the hardware profile is not here. Raises ArgumentError if the
        hardware is that of another number of ranks."""
        setting, profiles = self.setting or MeasureOptions(), self.rank_profiles
        if profiles is not None and profiles.ranks != ranks:
            raise ArgumentError(
                f"hardware {profiles.name} is that of {format_number_of('rank', profiles.ranks)}, and there are "
                f"{ranks}.",
                f"a profile for each of {ranks} ranks, or {argument('ranks', profiles.ranks)}.",
            )
        is_here = profiles is None and is_at_hand(self.hardware, setting)
        balance = "time" if self.balance == AUTO and not is_here else self.balance
        threads = setting.threads or threads_per_rank(ranks)
        return replace(self, balance=balance, setting=replace(setting, threads=threads, ranks=ranks))

    @property
    def factors(self) -> MemoryFactors:
        """How many times a rank holds each part of the memory of its stages."""
        factors = self.training.factors if self.factors_of_layout is None else self.factors_of_layout
        return factors._replace(allowance=self.allowance)

    @property
    def allowance(self) -> float:
        """The part of activations and buffers that the allocator needs on top of them."""
        return 0.0 if self.devices.is_cpu else _GPU_ALLOWANCE

    @property
    def devices(self) -> Hardware | RankProfiles:
        """What the ranks run on."""
        return self.rank_profiles or self.hardware

    def on_profile(self, profile: Hardware) -> PlanOptions:
        """Return the same options for ranks that all have one profile."""
        return replace(self, hardware=profile, rank_profiles=None)

    @property
    def timed(self) -> bool:
        """Whether the plan is for the least time of a step."""
        return self.balance in TIMED

    @property
    def link(self) -> Callable[[int, int], Link] | None:
        """(rank, other rank) → their link; None if the plan is not for the least time."""
        if not self.timed:
            return None
        return lambda rank, peer: self.devices.link(rank * self.stride, peer * self.stride)

    @property
    def host_link(self) -> Link | None:
        """The link to CPU memory; None if the plan is not for the least time, or it is not known."""
        return self.devices.host_link if self.timed else None

    @property
    def largest_memory(self) -> float:
        """The bytes of the rank that has the most; infinite without a limit."""
        memory = self.memory_bytes
        if memory is None:
            return math.inf
        return max(memory) if isinstance(memory, Sequence) else memory

    def memory_of_ranks(self, ranks: int) -> tuple[float, ...]:
        """Return the bytes of each of ``ranks`` ranks; infinite without a limit."""
        return memory_of_ranks(self.memory_bytes, ranks) or (math.inf,) * ranks

    def price(
        self,
        captured: Captured,
        cut_positions: Collection[int] = (),
        traced: dict[str, DividedFunction] | None = None,
        stages: int = 1,
    ) -> ChainCosts:
        """Price a model by the balance. Segments are cut at the operations ``cut_positions`` in any case.

        ``traced`` is shared by prices that differ in ``recompute`` or the hardware alone. With ``rank_profiles`` stages
        are priced on the devices of their ranks, and ``stages`` is their number. Raises PlanError, before anything is
        priced, if there are fewer segments than ``stages``.
        """
        traced = {} if traced is None else traced
        captured = self.training.computed(captured)

        def priced(recompute: Recompute, profile: Hardware) -> PricedModel:
            return price(
                captured,
                self.balance,
                profile,
                recompute,
                self.loss,
                self.setting,
                self.cache,
                cut_positions,
                traced,
                stages,
                self.training,
            )

        if isinstance(self.recompute, Recompute) and self.rank_profiles is None:
            return ChainCosts(priced(self.recompute, self.hardware))
        of_stages = (self.recompute,) * stages if isinstance(self.recompute, Recompute) else self.recompute
        profiles = self.profiles_of(self.schedule_of(len(of_stages)))
        costs: dict[tuple[Recompute, int], ChainCosts] = {}
        for choice, profile in zip(of_stages, profiles, strict=True):
            if (choice, id(profile)) not in costs:
                costs[choice, id(profile)] = ChainCosts(priced(choice, profile))
        keys = zip(of_stages, map(id, profiles), strict=True)
        return StagedCosts([costs[key] for key in keys])

    def profiles_of(self, schedule: Schedule) -> tuple[Hardware, ...]:
        """Return the profile of each stage."""
        profiles = self.rank_profiles
        if profiles is None:
            return (self.hardware,) * schedule.stages
        return tuple(profiles.distinct[profiles.numbers[rank]] for rank in schedule.placement)

    def schedule_of(self, stages: int) -> Schedule:
        """Return the schedule for ``stages`` stages. Raises as `resolve_schedule` does."""
        return resolve_schedule(self.schedule, stages, self.microbatches, None, self.ranks)

    def solve(self, costs: ChainCosts, stages: int, memory_bytes: float | Sequence[float] | None) -> Solution:
        """Find the best cuts, if a stage costs the sum of its segments. Raises as `solve` does."""
        report_progress("looking for the best cuts")
        chain = costs.priced.chain
        chain.check_stages(stages)
        return solve(
            costs.segments,
            stages,
            self.schedule,
            self.microbatches,
            ranks=self.ranks,
            objective="makespan" if self.timed else "bottleneck",
            memory_bytes=memory_bytes,
            link=self.link,
            factors=self.factors,
            effort=self.effort,
            names=[str(segment.point or "the first") for segment in chain.segments],
        )

    def check_parameters_fit(self, captured: Captured) -> None:
        """Raise PlanError if a single parameter is too large for any rank, because no cut divides it."""
        factors, captured = self.factors, self.training.computed(captured)

        def state_bytes_of(entry: StateEntry) -> float:
            size = entry.numel * entry.dtype.itemsize
            gradient = factors.gradients * size if entry.requires_grad else 0.0
            optimizer = factors.optimizer * self.training.bytes_of(captured, [entry])
            return (factors.parameters + factors.copies) * size + gradient + optimizer

        parameters = [entry for entry in captured.state.values() if entry.kind == "parameter"]
        largest = max(parameters, key=state_bytes_of, default=None)
        if largest is not None and (state_bytes := state_bytes_of(largest)) > self.largest_memory:
            state = " with its gradient and the optimizer's state" if largest.requires_grad else ""
            raise PlanError(
                f"The largest parameter, {largest.fqn}, takes {format_bytes(state_bytes)}{state}, "
                f"and a rank has {format_bytes(self.largest_memory)}. No cut divides a parameter.",
                f"{argument('memory_bytes', bytes_option(round(state_bytes * 1.25)))}, "
                "or shard the stage (parallelize_fn).",
            )


def check_number(name: str, number: object, example: int) -> None:
    """Raise ArgumentError unless this is a whole number from 1 on."""
    if type(number) is not int or number < 1:
        raise ArgumentError(f"{name} is a whole number from 1 on, not {number!r}.", f"{argument(name, example)}.")
