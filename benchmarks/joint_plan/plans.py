"""The four plans: the best rows, cuts and recompute of each layout under a limit of memory, as packages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pipegraph
from benchmarks.joint_plan.models import SUBJECTS
from pipegraph.cost import ONCE
from pipegraph.cost.block_times import MeasureOptions
from pipegraph.cost.hardware import ALL_REDUCE, Hardware
from pipegraph.graph.captured import Captured
from pipegraph.package.prediction import RankMemory
from pipegraph.planner.joint_plan.choices import Layout
from pipegraph.planner.joint_plan.layout_costs import LayoutCosts, tensor_shares
from pipegraph.planner.joint_plan.search import JointSearch, plan_of_choice
from pipegraph.planner.plan_options import PlanOptions
from pipegraph.planner.recompute_options import RecomputeOptions
from pipegraph.planner.step_prediction import rank_memory

LAYOUTS = {
    "pp 4": Layout(4, 1, 1, 1),
    "pp 2 × dp 2": Layout(2, 2, 1, 1),
    "dp 4": Layout(1, 4, 1, 1),
    "pp 2 × tp 2": Layout(2, 1, 1, 2),
}
DEVICES = 4


@dataclass(frozen=True)
class FourthPlan:
    """One of the four.

    Attributes:
        name: its layout.
        package: its folder.
        rows, microbatches: of a pipeline.
        step: predicted seconds.
        memory: predicted bytes of each rank of a pipeline, without those to receive into, which are not measured.
        exchanges: of F and of I of each stage, the predicted seconds of the collectives along tp.
    """

    name: str
    package: Path
    rows: int
    microbatches: int
    step: float
    memory: tuple[int, ...]
    exchanges: tuple[tuple[float, float], ...]


def write_plans(
    subject: str, folder: Path, hardware: Hardware, balance: str, batch: int, rows: int, memory: float | None
) -> list[FourthPlan]:
    """Plan each layout, and write its package."""
    workload = SUBJECTS[subject]()

    def captured(count: int) -> Captured:
        return pipegraph.capture(workload.model, (workload.batch(count)[0],))

    def options(count: int) -> PlanOptions:
        loss = workload.loss, workload.batch(count)[1]
        return PlanOptions(balance, hardware=hardware, loss=loss, setting=MeasureOptions(threads=1))

    models = {count: captured(count) for count in (rows, 2 * rows)}
    single, double = (RecomputeOptions.price(model, options(count)) for count, model in models.items())
    shares = tensor_shares(single.costs[0].priced.chain, workload.tp_plan)
    search = JointSearch(LayoutCosts(hardware, rows, single, double, shares), DEVICES, batch, memory, ["1f1b"])
    plans = []
    for name, layout in LAYOUTS.items():
        choices = [search.search(candidate, 0.2) for candidate in search.candidates if candidate.layout == layout]
        choice = min(
            (joint_choice for joint_choice in choices if joint_choice is not None),
            key=lambda joint_choice: joint_choice.step,
        )
        model = models.get(choice.candidate.rows) or captured(choice.candidate.rows)
        plan = plan_of_choice(model, choice, options(rows), 0.0)
        package = pipegraph.write_package(plan, folder / str(len(plans)))
        stages, schedule = choice.costs.stages(choice.solution.cuts), choice.solution.schedule
        rank_memories = rank_memory(stages, schedule, choice.candidate.factors(ONCE))
        edges = [0, *choice.solution.cuts, len(shares)]
        exchanges = [
            tuple(
                sum(
                    hardware.links.collective_seconds(ALL_REDUCE, size * choice.candidate.rows / rows, layout.tp)
                    for share in shares[begin:end]
                    for size in getattr(share, direction)
                )
                for direction in ("forward", "backward")
            )
            for begin, end in pairwise(edges)
        ]
        plans.append(
            FourthPlan(
                name,
                package.path,
                choice.candidate.rows,
                choice.candidate.microbatches,
                choice.step,
                tuple(map(_held_bytes, rank_memories)),
                tuple(exchanges),  # type: ignore[arg-type]
            )
        )
    return plans


def _held_bytes(memory: RankMemory) -> int:
    """The bytes that a run measures: everything but what comes and goes while actions run."""
    state = memory.parameters + memory.gradients + memory.optimizer_state + memory.model_buffers
    return state + (memory.activations or 0)
