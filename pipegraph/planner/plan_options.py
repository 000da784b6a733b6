"""What a plan is made for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipegraph.cost.block_times import MeasureOptions
from pipegraph.cost.hardware import Hardware, Link
from pipegraph.cost.measurement_cache import Cache
from pipegraph.cost.price import price
from pipegraph.cost.segments.distinct_blocks import LossOf
from pipegraph.errors import PlanError
from pipegraph.graph.captured import Captured, StateEntry
from pipegraph.kernels.threads import threads_per_rank
from pipegraph.planner.arguments import check_balance, check_number, check_recompute
from pipegraph.planner.priced_model import Costs
from pipegraph.planner.solver.solve import Solution, solve
from pipegraph.planner.solver.solve_arguments import byte_limits
from pipegraph.planner.solver.stage_schedule import arrange
from pipegraph.progress import report_progress
from pipegraph.schedule import Schedule
from pipegraph.schedule.recipes import find_recipe
from pipegraph.units import bytes_option, format_bytes, format_number_of

TIMED = "time", "measured"
"""The balances in seconds, for which a step is predicted. By any other the largest stage is made as small as it can."""


@dataclass(frozen=True)
class Aim:
    """What a plan is made for: the arguments of `pipegraph.plan` beside the model and its cuts.

    Raises ArgumentError for a balance, recompute or number that is none, and ScheduleError for such a schedule.
    """

    balance: str = "time"
    schedule: str | Schedule = "1f1b"
    microbatches: int = 8
    ranks: int | None = None
    memory_bytes: float | Sequence[float] | None = None
    hardware: Hardware = field(default_factory=lambda: Hardware.load("cpu"))
    recompute: str = "min-cut"
    loss: tuple[LossOf, Any] | None = None
    state_factor: float = 4.0
    effort: float = 1.0
    setting: MeasureOptions | None = None
    cache: Cache | None = None

    def __post_init__(self) -> None:
        check_balance(self.balance)
        check_recompute(self.recompute)
        check_number("microbatches", self.microbatches, 8)
        if self.ranks is not None:
            check_number("ranks", self.ranks, 4)
        if not isinstance(self.schedule, Schedule):
            find_recipe(self.schedule)

    def on_ranks(self, ranks: int) -> Aim:
        """The same for so many ranks, of which one is measured with the threads that `pipegraph run` gives it."""
        setting = self.setting or MeasureOptions()
        threads = setting.threads or threads_per_rank(ranks)
        return replace(self, setting=replace(setting, threads=threads, ranks=ranks))

    @property
    def timed(self) -> bool:
        """Whether the plan is for the least time of a step."""
        return self.balance in TIMED

    def price(self, captured: Captured, kept: Collection[int] = ()) -> Costs:
        """Price a model as its segments are to be balanced; with cuts at the operations ``kept`` in any case."""
        priced = price(
            captured,
            self.balance,
            self.hardware,
            self.recompute,
            self.loss,
            self.setting,
            self.cache,
            kept,
        )
        return Costs(priced)

    def arrange(self, stages: int) -> Schedule:
        """The schedule of so many stages. Raises as `pipegraph.planner.solver.stage_schedule.arrange` does."""
        return arrange(self.schedule, stages, self.microbatches, None, self.ranks)

    def solve(self, costs: Costs, stages: int, memory_bytes: float | Sequence[float] | None) -> Solution:
        """The cuts of a priced chain, by what its segments add up to."""
        report_progress("looking for the best cuts")
        chain = costs.priced.chain
        if stages > len(chain.segments):
            parts = format_number_of("segment", len(chain.segments))
            raise PlanError(
                f"{chain.captured.model_name} can be cut into {parts}, which is too few for {stages} "
                f"stages.\nTry: --stages {len(chain.segments)} or fewer."
            )
        return solve(
            costs.segments,
            stages,
            self.schedule,
            self.microbatches,
            ranks=self.ranks,
            objective="makespan" if self.timed else "bottleneck",
            memory_bytes=memory_bytes,
            link=self.link,
            state_factor=self.state_factor,
            effort=self.effort,
            names=[str(segment.point or "the first") for segment in chain.segments],
        )

    @property
    def link(self) -> Callable[[int, int], Link] | None:
        """What crossing between two ranks takes; None where no time is looked at."""
        return self.hardware.link if self.timed else None

    def limits(self, ranks: int) -> tuple[float, ...]:
        """What each of so many ranks has: infinite without a limit."""
        return byte_limits(self.memory_bytes, ranks) or (math.inf,) * ranks

    def check_memory(self, captured: Captured) -> None:
        """Raises PlanError if there is a parameter that is too large for any rank: no cut makes a stage smaller."""
        parameters = [entry for entry in captured.state.values() if entry.kind == "parameter"]
        if self.memory_bytes is None or not parameters:
            return
        most = max(self.memory_bytes) if isinstance(self.memory_bytes, Sequence) else self.memory_bytes

        def held_for(entry: StateEntry) -> float:
            return entry.numel * entry.dtype.itemsize * (self.state_factor if entry.requires_grad else 1.0)

        largest = max(parameters, key=held_for)
        held = held_for(largest)
        if held > most:
            state = " with its gradient and the optimizer's state" if largest.requires_grad else ""
            raise PlanError(
                f"The largest parameter, {largest.fqn}, takes {format_bytes(held)}{state}, "
                f"and a rank has {format_bytes(most)}. No cut parts a parameter.\n"
                f"Try: --memory {bytes_option(round(held * 1.25))}, or shard the stage (parallelize_fn)."
            )
