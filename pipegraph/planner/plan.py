"""``plan``: a model is cut into stages, at given points or where that is best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from pipegraph.cost.block_times import MeasureOptions
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.measurement_cache import Cache
from pipegraph.cost.price import PricedModel
from pipegraph.cost.segments.distinct_blocks import LossOf
from pipegraph.cost.stage_cost import stage_cost
from pipegraph.dump import dump
from pipegraph.errors import PlanError
from pipegraph.graph.captured import Captured
from pipegraph.graph.graph_text import graph_text, stages_text
from pipegraph.graph.partition.split_points import Point, SplitPoint, locate, mark
from pipegraph.graph.partition.stages import Boundary, StageGraph, boundaries, divide_into_stages
from pipegraph.package import StageCost
from pipegraph.package.prediction import Prediction, StagePrediction
from pipegraph.planner.arguments import UNIFORM, ArgumentError, check_number, memory_limits
from pipegraph.planner.cut_choice import Choice, choose, given, settle
from pipegraph.planner.plan_options import Aim
from pipegraph.planner.solver.memory_shortage import MemoryShortage
from pipegraph.planner.solver.solve import Solution
from pipegraph.planner.stage_modules import stage_modules
from pipegraph.schedule import Schedule
from pipegraph.units import bytes_option, format_bytes, format_number_of


@dataclass(frozen=True, eq=False)
class Plan:
    """Where a model is cut, and what follows from it.

    Attributes:
        captured: the model; its graph carries a ``split_point`` node at each cut.
        points: the split points, in order.
        stages: one more than points.
        boundaries: everything that crosses, the model's inputs and outputs included.
        costs: of each stage, for one microbatch.
        prediction: what a step is expected to take; None where nothing was priced.
        priced: the model's segments with their costs; and
        solution: how the cuts were found; None where they were given.
    """

    captured: Captured = field(repr=False)
    points: tuple[Point, ...]
    stages: tuple[StageGraph, ...]
    boundaries: tuple[Boundary, ...] = field(repr=False)
    costs: tuple[StageCost, ...]
    prediction: Prediction | None = None
    priced: PricedModel | None = field(default=None, repr=False)
    solution: Solution | None = field(default=None, repr=False)

    def describe(self) -> list[str]:
        """A line per stage: ``stage 0: embed, layers.0 – layers.3``."""
        return [f"stage {stage.index}: {', '.join(stage_modules(self.captured, stage))}" for stage in self.stages]

    def predicted(self, prediction: Prediction) -> Plan:
        """This plan with what it is expected to take."""
        stages = zip(self.costs, prediction.stages, strict=True)
        costs = tuple(_with(cost, stage, prediction.in_seconds) for cost, stage in stages)
        return replace(self, prediction=prediction, costs=costs)


def plan(
    captured: Captured,
    points: Sequence[str | Point] | Mapping[str, SplitPoint] | None = None,
    stages: int | None = None,
    balance: str | None = None,
    schedule: str | Schedule | None = None,
    microbatches: int | None = None,
    ranks: int | None = None,
    memory_bytes: float | str | Sequence[float | str] | None = None,
    hardware: Hardware | str | Path | None = None,
    recompute: str | None = None,
    loss: tuple[LossOf, Any] | None = None,
    *,
    state_factor: float = 4.0,
    effort: float = 1.0,
    setting: MeasureOptions | None = None,
    cache: Cache | None = None,
) -> Plan:
    """Cut a captured model.

    Args:
        captured: from :func:`pipegraph.capture`.
        points: FQNs that start a stage (``layers.4``; ``layers.3:end`` starts one behind it), in the model's order; or
            FQN → ``SplitPoint``, as ``torch.distributed.pipelining`` takes them. What a step then takes is predicted
            if a balance, schedule, microbatches, memory_bytes, hardware or recompute is given as well.
        stages: cut into this many stages instead, where that is best.
        balance: what stages are balanced by. ``time`` (the default) and ``measured`` are for the least time of a step:
            by a roofline of the hardware, or as the segments run here. ``flops``, ``parameters``, ``memory`` and
            ``type:REGEX`` (layers whose class name matches) make the largest stage the smallest; ``uniform`` makes
            equal numbers of segments; what a step takes is predicted as for ``points``.
        schedule: a name, or a schedule of so many stages; "1f1b" by default.
        microbatches: of a step; 8 by default.
        ranks: for schedules that can have any number of stages on a rank.
        memory_bytes: what each rank has: one figure or size ("80GiB"), or one for each. What is kept between actions
            has to fit: activations, parameters, buffers, gradients, optimizer state, and receive buffers; not what a
            kernel needs while it runs.
        hardware: a profile, its name or its file; ``cpu`` by default.
        recompute: "none", "min-cut" (the default) or "block", as the pipeline will run with.
        loss: (function of output and target, target); the mean square of the outputs by default.
        state_factor: how many times a rank holds parameters that are not frozen: 4 with gradients and AdamW's moments.
        effort: how long the search goes on; 1 is a few seconds.
        setting, cache: for ``measured``; see `pipegraph.cost.price.price`.

    Raises:
        ArgumentError: an argument that no model could be planned with; a PlanError.
        PlanError: a point is unknown, out of order, duplicate or cuts nothing; more stages than segments; neither or
            both of ``points`` and ``stages``; or a `MemoryShortage`: nothing fits into the memory.
        ScheduleError: a schedule that there is not, or not with these numbers.
    """
    if points is not None and stages is not None:
        raise PlanError("Both split points and a number of stages were given.\nTry: --points or --stages, not both.")
    profile = hardware if isinstance(hardware, Hardware) else Hardware.load(hardware or "cpu")
    aim = Aim(
        balance or "time", schedule or "1f1b", 8 if microbatches is None else microbatches, ranks,
        memory_limits(memory_bytes), profile, recompute or "min-cut", loss, state_factor, effort, setting, cache,
    )  # fmt: skip
    if stages is not None:
        check_number("stages", stages, 2)
        if balance != UNIFORM:
            return best(captured, aim, stages)
        chosen, starts = _equal_segments(captured, stages)
        wanted: tuple[object, ...] = ()
    elif points:
        chosen = _points(points)
        starts = locate(captured, chosen)
        if not aim.timed:
            raise ArgumentError(
                f"--balance {aim.balance} chooses points, and they were given.\nTry: --stages {len(starts) + 1} "
                "instead, or --balance time, which tells what a step takes with these points."
            )
        wanted = (balance,)
    else:
        raise PlanError(
            f"No split point was given for {captured.model_name}.\n"
            f"Try: --points {_suggestion(captured)}, or --stages 2."
        )
    aim = aim.on_ranks(aim.arrange(len(starts) + 1).ranks)
    made = _cut(captured, chosen, starts)
    wanted += (schedule, microbatches, memory_bytes, hardware, recompute)
    return made if all(each is None for each in wanted) else _predicted(made, captured, aim, starts)


def best(captured: Captured, aim: Aim, stages: int) -> Plan:
    """Cut a model into so many stages, where that is best. Raises as `plan` does."""
    # What is no schedule, or none of so many stages, is told before anything is priced.
    aim = aim.on_ranks(aim.arrange(stages).ranks)
    aim.check_memory(captured)
    costs = aim.price(captured)
    try:
        return plan_of(settle(choose(costs, aim, stages)))
    except MemoryShortage as shortage:
        if aim.recompute == "block":
            raise
        raise MemoryShortage(f"{shortage}\n{_with_recompute(captured, aim, stages)}", shortage.needed) from None


def plan_of(choice: Choice) -> Plan:
    """The plan that cuts where it was chosen to."""
    priced = choice.costs.priced
    chain = priced.chain
    starts = [chain.segments[cut].start for cut in choice.cuts]
    made = _cut(chain.captured, chain.points(choice.cuts), starts).predicted(choice.predict())
    return replace(made, priced=priced, solution=choice.solution)


def _cut(captured: Captured, points: Sequence[Point], starts: Sequence[int]) -> Plan:
    marked = mark(captured, points, starts)
    divided = divide_into_stages(marked)
    crossing = boundaries(marked, divided)
    dump("marked", lambda: graph_text(marked.graph.nodes, "with split points"))
    dump("stages", lambda: stages_text(divided, crossing))
    costs = tuple(_cost(marked, stage, crossing) for stage in divided)
    return Plan(captured=marked, points=tuple(points), stages=divided, boundaries=crossing, costs=costs)


def _predicted(made: Plan, captured: Captured, aim: Aim, starts: Sequence[int]) -> Plan:
    """A plan of given cuts with what they are expected to take."""
    method = aim.balance
    aim = replace(aim, balance="time") if method == UNIFORM else aim
    costs = aim.price(captured, starts)
    begins = [segment.start for segment in costs.priced.chain.segments]
    instead = "--balance time" if method == UNIFORM else f"--stages {len(starts) + 1} in place of points"
    choice = given(costs, aim, [begins.index(start) for start in starts], instead)
    return replace(made.predicted(structs.replace(choice.predict(), balance=method)), priced=costs.priced)


def _with_recompute(captured: Captured, aim: Aim, stages: int) -> str:
    """What recomputing each block would change where memory is short."""
    aim = replace(aim, recompute="block")
    try:
        needed = choose(aim.price(captured), aim, stages).peak
    except MemoryShortage as shortage:
        return (
            f'With recompute="block", which keeps the least, {format_bytes(shortage.needed)} would do.\n'
            f"Try: --recompute block --memory {bytes_option(shortage.needed)}, or more stages."
        )
    return f'With recompute="block" there are cuts that fit, and need {format_bytes(needed)}.\nTry: --recompute block.'


def _points(points: Sequence[str | Point] | Mapping[str, SplitPoint]) -> tuple[Point, ...]:
    if isinstance(points, Mapping):
        return tuple(Point(fqn, side) for fqn, side in points.items())
    if isinstance(points, str):
        raise PlanError(f"points is a string, not a sequence of names.\nTry: points={points.split(',')!r}.")
    return tuple(point if isinstance(point, Point) else Point.parse(point) for point in points)


def _equal_segments(captured: Captured, stages: int) -> tuple[tuple[Point, ...], list[int]]:
    chain = captured.segments
    if stages > len(chain):
        named = _few([segment.fqn for segment in chain if segment.fqn])
        has = format_number_of("segment", len(chain))
        raise PlanError(
            f"{captured.model_name} has {has}{f' ({named})' if named else ''}, which is too few for {stages} "
            f"stages.\nTry: --stages {len(chain)}, or --points inside a segment."
        )
    firsts = [chain[round(index * len(chain) / stages)] for index in range(1, stages)]
    return tuple(Point(segment.fqn) for segment in firsts), [segment.start for segment in firsts]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, …, {names[-1]}"


def _suggestion(captured: Captured) -> str:
    chain = captured.segments
    return chain[len(chain) // 2].fqn or "layers.4"


def _cost(captured: Captured, stage: StageGraph, crossing: Sequence[Boundary]) -> StageCost:
    producer = {boundary.node: boundary for boundary in crossing}
    return stage_cost(
        stage.nodes,
        [captured.state[fqn] for fqn in stage.state],
        received=[node for node in stage.inputs if producer[node].producer >= 0],
        sent=[node for node in stage.outputs if set(producer[node].consumers) - {stage.index}],
    )


def _with(cost: StageCost, stage: StagePrediction, in_seconds: bool) -> StageCost:
    cost = structs.replace(cost, saved_bytes=stage.saved_bytes, weight_saved_bytes=stage.weight_saved_bytes)
    if not in_seconds:
        return cost
    return structs.replace(cost, forward=stage.forward, input_grad=stage.input_grad, weight_grad=stage.weight_grad)
