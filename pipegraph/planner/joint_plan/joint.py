"""``joint_plan``: the best plan of a model for a cluster, over all axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from pipegraph.cost.balance import AUTO
from pipegraph.cost.model_output import LossOf
from pipegraph.garbage import rare_collection
from pipegraph.graph.captured import Captured
from pipegraph.package.prediction import ShiftedCut
from pipegraph.planner.cut_choice import CutChoice, rounded
from pipegraph.planner.joint_plan.choices import JointChoice, JointComparison
from pipegraph.planner.joint_plan.layout_costs import LayoutCosts
from pipegraph.planner.joint_plan.search import SCHEDULES, JointSearch
from pipegraph.planner.joint_plan.tensor_shares import tensor_shares
from pipegraph.planner.plan import Plan, plan
from pipegraph.planner.plan_options import PlanOptions
from pipegraph.planner.recompute_options import RecomputeOptions


@rare_collection()  # schedules of many actions
def joint_plan(
    capture_rows: Callable[[int], tuple[Captured, tuple[LossOf, Any] | None]],
    rows: int,
    options: PlanOptions,
    devices: int,
    global_batch: int,
    schedules: Sequence[str] = SCHEDULES,
    tp_plan: Mapping[str, str] | None = None,
    most_tp: int | None = None,
) -> tuple[JointComparison, Plan]:
    """Compare the plans of a model for a cluster, and return them with the best one.

    Args:
        capture_rows: captures the model with a number of rows of a microbatch; also returns the loss and the target, as
            in `PlanOptions`.
        rows: the least number of rows to consider; two, four and eight times this number are considered too.
        options: how the model is priced, ``auto`` as ``time``; ``memory_bytes`` is one number, the memory of a device.
        devices: the number of devices.
        global_batch: rows of a step over all devices.
        schedules: to compare.
        tp_plan: the model's tensor-parallel plan; without one there is no tp.
        most_tp: the largest number of ranks along tp; by default the ranks of a node.

    Raises:
        PlanError: no layout has numbers that are possible; a `MemoryShortage` if nothing fits.
    """
    options = replace(options, balance="time") if options.balance == AUTO else options
    captured = {count: capture_rows(count) for count in (rows, 2 * rows)}
    single, double = (RecomputeOptions.price(model, replace(options, loss=loss)) for model, loss in captured.values())
    single, double = single.only(double.recompute), double.only(single.recompute)
    shares = tensor_shares(single.costs[0].priced.chain, tp_plan) if tp_plan else []
    costs = LayoutCosts(options.hardware, rows, single, double, shares)
    memory = None if options.memory_bytes is None else options.largest_memory
    search = JointSearch(costs, devices, global_batch, memory, schedules, most_tp, options.effort)
    comparison = search.run()
    best = comparison.best
    model, _ = captured.get(best.candidate.rows) or capture_rows(best.candidate.rows)
    return comparison, plan_of_choice(model, best, options, comparison.lower_bound)


def plan_of_choice(captured: Captured, choice: JointChoice, options: PlanOptions, bound: float) -> Plan:
    """Return the plan of a choice, of which no plan takes less than ``bound`` seconds, for a model that was captured
    with its rows of a microbatch."""
    candidate, layout = choice.candidate, choice.candidate.layout
    plan_options = replace(
        options,
        schedule=candidate.schedule,
        microbatches=candidate.microbatches,
        ranks=layout.pp,
        recompute=choice.recompute,
        state_factor=candidate.state_factor,
        stride=layout.stride,
    )
    cuts = CutChoice(choice.costs, plan_options, choice.solution.cuts, choice.solution.schedule, choice.solution)
    mesh = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
    predicted = cuts.predict()
    collectives = choice.step - choice.solution.value
    prediction = structs.replace(
        predicted,
        value=rounded(choice.step),
        lower_bound=rounded(min(bound, choice.step)),
        mesh=mesh if layout.stride > 1 else {},
        resident=candidate.resident,
        cuts=tuple(
            structs.replace(cut, earlier=_with(cut.earlier, collectives), later=_with(cut.later, collectives))
            for cut in predicted.cuts
        ),
    ).with_reasons()
    points = [str(point) for point in cuts.points]
    cut_plan = plan(captured, points=points) if points else plan(captured, stages=1, balance="uniform")
    return replace(cut_plan.predicted(prediction), priced=choice.costs.priced)


def _with(cut: ShiftedCut | None, collectives: float) -> ShiftedCut | None:
    """The next place for a cut, with the seconds of collectives, as the value of the plan counts them."""
    return cut if cut is None or cut.value is None else structs.replace(cut, value=rounded(cut.value + collectives))
