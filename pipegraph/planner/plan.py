"""``plan``: cut a model into stages, at given points or at the best ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from os import PathLike
from types import NoneType
from typing import Any

from msgspec import structs

from pipegraph.arguments import argument, require_type
from pipegraph.cost.balance import UNIFORM
from pipegraph.cost.block_times import Cache, MeasureOptions
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.model_output import LossOf
from pipegraph.cost.price import PricedModel
from pipegraph.cost.rank_profiles import Profiles, RankProfiles, load_profiles
from pipegraph.cost.stage_cost import stage_cost
from pipegraph.cost.training_state import OWN_DTYPES, TrainingState
from pipegraph.debug import dump
from pipegraph.errors import ArgumentError, PlanError, one_line
from pipegraph.graph.captured import Captured
from pipegraph.graph.graph_text import graph_text, stage_modules, stages_text
from pipegraph.graph.partition.split_points import Point, SplitPoint, locate, mark, point_before, points_of_pipe_splits
from pipegraph.graph.partition.stages import Boundary, StageGraph, boundaries, divide_into_stages
from pipegraph.graph.partition.stages import relay_skips as relay
from pipegraph.notebook import draw
from pipegraph.package import StageCost
from pipegraph.package.prediction import Prediction, StagePrediction
from pipegraph.planner.cut_choice import CutChoice, choose_cuts, given_cuts, refine_cuts
from pipegraph.planner.layer_layout import is_layout, layout_of, layout_points
from pipegraph.planner.plan_options import PlanOptions, check_number
from pipegraph.planner.recompute_options import choose_recompute, choose_recompute_at, parse_recompute
from pipegraph.planner.solver.solve import MemoryShortage, Solution
from pipegraph.planner.solver.solve_arguments import parse_memory
from pipegraph.recompute import AUTO, Recompute
from pipegraph.schedule import Schedule
from pipegraph.units import bytes_option, format_bytes, format_number_of

# ---- point arguments -------------------------------------------------------------------------------------------------
# Split points as users specify them: names of modules, Megatron's layouts, or stages with equal numbers of segments.


def parse_points(captured: Captured, points: Sequence[str | Point] | Mapping[str, Enum] | str) -> tuple[Point, ...]:
    """Return the points that are given as names, as Megatron's layout, or as names with torch's sides.

    Raises:
        PlanError: a string that is not a layout; an unknown side.
        ArgumentError: an argument of another type.
    """
    if isinstance(points, Mapping):
        return tuple(replace(_without_side(fqn), side=_side(fqn, side)) for fqn, side in points.items())
    if isinstance(points, str) and is_layout(points):
        return layout_points(captured, points)
    if isinstance(points, str):
        raise PlanError("points is a string, not a sequence of names.", f"points={points.split(',')!r}.")
    require_type(points, Iterable, "points are names of modules", 'points=["layers.4"]')
    for point in points:
        require_type(point, (str, Point), "Each of points is the name of a module", 'points=["layers.4"]')
    return tuple(point if isinstance(point, Point) else Point.parse(point) for point in points)


def _without_side(fqn: str) -> Point:
    return Point(fqn) if ":" in fqn else Point.parse(fqn)


def _side(fqn: str, side: object) -> SplitPoint:
    """Return the side of a point by its name, because torch has another enumeration with the same names."""
    name = str(getattr(side, "name", ""))
    if name not in SplitPoint.__members__:
        raise PlanError(f"points[{fqn!r}] is {side!r}.", "SplitPoint.BEGINNING or SplitPoint.END.")
    return SplitPoint[name]


def equal_segments(captured: Captured, stages: int) -> tuple[tuple[Point, ...], list[int]]:
    """Return points between which there are equally many segments, and where in the graph the stages begin.

    Raises:
        PlanError: there are fewer segments than stages.
    """
    chain = captured.segments
    if stages > len(chain):
        named = _few([segment.fqn for segment in chain if segment.fqn])
        count = format_number_of("segment", len(chain))
        raise PlanError(
            f"{captured.model_name} has {count}{f' ({named})' if named else ''}, which is too few for {stages} stages.",
            f"{argument('stages', len(chain))}, or {argument('points')} inside a segment.",
        )
    firsts = [chain[round(index * len(chain) / stages)] for index in range(1, stages)]
    return tuple(point_before(captured, segment) for segment in firsts), [segment.start for segment in firsts]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, …, {names[-1]}"


# ---- plan ------------------------------------------------------------------------------------------------------------


_BLOCK = Recompute.parse("block")


@dataclass(frozen=True, eq=False)
class Plan:
    """Where a model is cut, and what follows from it.

    Attributes:
        captured: the model; its graph carries a ``split_point`` node at each cut.
        points: the split points, in order.
        stages: one more than points.
        boundaries: everything that crosses, including the model's inputs and outputs.
        costs: the cost of each stage for one microbatch.
        prediction: what a step is expected to take; None if nothing was priced.
        priced: the model's segments with their costs; None if nothing was priced.
        solution: how the cuts were found; None if they were given.
        relays_skips: whether every value is handed on from neighbour to neighbour.
    """

    captured: Captured = field(repr=False)
    points: tuple[Point, ...]
    stages: tuple[StageGraph, ...]
    boundaries: tuple[Boundary, ...] = field(repr=False)
    costs: tuple[StageCost, ...]
    prediction: Prediction | None = None
    priced: PricedModel | None = field(default=None, repr=False)
    solution: Solution | None = field(default=None, repr=False)
    relays_skips: bool = False

    def __repr__(self) -> str:
        points, stages = ", ".join(map(str, self.points)), format_number_of("stage", len(self.stages))
        step = "" if self.prediction is None else f"; {self.prediction.in_a_line}"
        return one_line(f"Plan({self.captured.model_name} in {stages}, cut at {points}{step})")

    def _repr_html_(self) -> str | None:
        return draw("plan_html", self)

    def describe(self) -> list[str]:
        """Return a line per stage: ``stage 0: embed, layers.0 – layers.3``."""
        return [f"stage {stage.index}: {', '.join(stage_modules(self.captured, stage))}" for stage in self.stages]

    @property
    def layout(self) -> str:
        """The stages as Megatron's layout: ``Et*3|(tt|)*4,L``; empty if they are not of whole repeated layers."""
        return layout_of(self.captured, locate(self.captured, self.points))

    def stage_inputs(self, stage: StageGraph) -> tuple[Boundary, ...]:
        """Return the boundary of each input of a stage."""
        of_node = {boundary.node: boundary for boundary in self.boundaries if stage.index in boundary.consumers}
        return tuple(of_node[node] for node in stage.inputs)

    def stage_outputs(self, stage: StageGraph) -> tuple[Boundary, ...]:
        """Return the boundary of each output of a stage. The last stage may return what it took, or others gave."""
        of_node = {boundary.node: boundary for boundary in self.boundaries}
        of_node |= {boundary.node: boundary for boundary in self.stage_inputs(stage)}
        of_node |= {boundary.node: boundary for boundary in self.boundaries if boundary.producer == stage.index}
        return tuple(of_node[node] for node in stage.outputs)

    def with_relays(self) -> Plan:
        """Return this plan with every value handed on from neighbour to neighbour, which no prediction counts."""
        stages = relay(self.captured, self.stages)
        relay_plan = _plan_of(self.captured, self.points, stages)
        crossing = [(cost.input_bytes, cost.output_bytes) for cost in relay_plan.costs]
        costs = tuple(
            structs.replace(cost, input_bytes=input_bytes, output_bytes=output_bytes)
            for cost, (input_bytes, output_bytes) in zip(self.costs, crossing, strict=True)
        )
        return replace(self, stages=stages, boundaries=relay_plan.boundaries, costs=costs, relays_skips=True)

    def for_capture(self, captured: Captured) -> Plan:
        """Return the plan that cuts another capture of the model at the same points. Nothing is predicted for it.

        Raises PlanError if a point cuts nothing there.
        """
        cut_plan = _cut(captured, self.points, locate(captured, self.points))
        return cut_plan.with_relays() if self.relays_skips else cut_plan

    def predicted(self, prediction: Prediction) -> Plan:
        """Return this plan with a prediction."""
        stages = zip(self.costs, prediction.stages, strict=True)
        costs = tuple(_with_prediction(cost, stage, prediction) for cost, stage in stages)
        return replace(self, prediction=prediction, costs=costs)


def plan(
    captured: Captured,
    points: Sequence[str | Point] | Mapping[str, Enum] | str | None = None,
    stages: int | None = None,
    balance: str | None = None,
    schedule: str | Schedule | None = None,
    microbatches: int | None = None,
    ranks: int | None = None,
    memory_bytes: float | str | Sequence[float | str] | None = None,
    hardware: Profiles | None = None,
    recompute: Any = None,
    loss: tuple[LossOf, Any] | None = None,
    *,
    precision: str | None = None,
    optimizer: str = "adamw",
    optimizer_bytes: float | None = None,
    effort: float = 1.0,
    setting: MeasureOptions | None = None,
    cache: Cache | None = None,
    relay_skips: bool = False,
) -> Plan:
    """Cut a captured model.

    Args:
        captured: from :func:`pipegraph.capture`.
        points: FQNs that start a stage, in the model's order (``layers.4``; ``layers.3:end`` starts one after that
            module); FQN → ``SplitPoint`` of pipegraph or of ``torch.distributed.pipelining``; or Megatron's layout of
            the stages, ``Et*3|(tt|)*4,L`` (`pipegraph.planner.layer_layout`). If neither ``points`` nor ``stages`` is
            given, the model is cut at its own calls of ``pipe_split()``. The time and memory of a step are predicted
            if a balance, schedule, microbatches, memory_bytes, hardware, recompute, precision or optimizer is given
            as well.
        stages: cut into this number of stages instead, at the best points.
        balance: what is balanced. ``time`` (the default), ``measured`` and ``auto`` minimize the time of a step.
            ``time`` predicts it by a roofline of the hardware; ``measured`` runs the segments here; ``auto`` runs the
            layers that can be run within a quarter of a minute, and uses the roofline for the rest, or for everything
            if the hardware is not here. ``flops``, ``parameters``, ``memory`` and ``type:REGEX`` (layers whose class
            name matches) minimize the largest stage. ``uniform`` makes equal numbers of segments; a step is predicted
            as for ``points``.
        schedule: a name, or a schedule with this number of stages; "1f1b" by default.
        microbatches: of a step; 8 by default.
        ranks: for schedules that can have any number of stages on a rank.
        memory_bytes: the memory of each rank: one number or size ("80GiB"), or one per rank. Activations, parameters,
            buffers, gradients, optimizer state, receive buffers and what F, I and W need while they run have to fit.
        hardware: a profile, its name or its file; ``cpu`` by default. For ranks with unequal devices a sequence, one
            for each rank, or text with numbers of ranks: ``h100*4,a100*4``.
        recompute: "none", "min-cut" (the default), "block" or "offload"; such a choice for patterns of module names; or
            a sequence with one of these for each stage: as `Pipeline` takes it, without policies. "auto" chooses one
            for each stage, together with the cuts if they are not given, so that a step that fits the memory is the
            shortest.
        loss: (function of output and target, target); by default the loss that the model returns, or the mean
            square of its outputs.
        precision: the dtypes that the model is trained in: "fp32", "bf16" or another one of `Pipeline`; "bf16-master",
            bfloat16 parameters and an optimizer with float32 ones; or "fp8". By default the model's own dtypes, with
            gradients and moments in them.
        optimizer: "adamw", "sgd", "sgd-momentum", "muon" or "adafactor".
        optimizer_bytes: bytes of the state of another optimizer for each element that is trained, without float32
            copies of the parameters.
        effort: how long the search continues; 1 is a few seconds.
        setting, cache: for ``measured`` and ``auto``; see `pipegraph.cost.price.price`.
        relay_skips: whether a value for a later stage than the next one is sent through the stages in between, as
            torch's ``PipelineStage`` needs it, instead of directly. Predictions of a step do not include this.

    Raises:
        ArgumentError: an argument has a value that is invalid for every model.
        PlanError: a point is unknown, out of order, duplicate or cuts nothing; more stages than segments; neither or
            both of ``points`` and ``stages``; or a `MemoryShortage`: no cuts fit into the memory.
        ScheduleError: an unknown schedule, or one that cannot have these numbers.
    """
    _check_types(captured, schedule, hardware, loss, setting, cache)
    if points is not None and stages is not None:
        choice = f"{argument('points')} or {argument('stages')}"
        raise PlanError("Both split points and a number of stages were given.", f"{choice}, not both.")
    devices = load_profiles("cpu" if hardware is None else hardware)
    profile = devices.profiles[0] if isinstance(devices, RankProfiles) else devices
    options = PlanOptions(
        balance or "time", schedule or "1f1b", 8 if microbatches is None else microbatches, ranks,
        parse_memory(memory_bytes), profile, Recompute(), loss,
        TrainingState(precision, optimizer, optimizer_bytes), None, effort, setting, cache,
        rank_profiles=devices if isinstance(devices, RankProfiles) else None,
    )  # fmt: skip
    if stages is not None:
        check_number("stages", stages, 2)
        options.schedule_of(stages)  # what no schedule can have is refused before anything is made for each stage
        is_auto = recompute == AUTO
        options = options if is_auto else replace(options, recompute=parse_recompute(captured, recompute, stages))
        if balance != UNIFORM:
            best = _best_plan(captured, options, stages, is_auto)
            return best.with_relays() if relay_skips else best
        split_points, starts = equal_segments(captured, stages)
        balance = None
    elif points or (points is None and captured.pipe_splits):
        split_points = parse_points(captured, points) if points else points_of_pipe_splits(captured)
        starts = locate(captured, split_points)
        if not options.timed:
            raise ArgumentError(
                f"{argument('balance', options.balance)} chooses points, and they were given.",
                f"{argument('stages', len(starts) + 1)} instead, or {argument('balance', 'time')}, which "
                "predicts what a step takes with these points.",
            )
    else:
        middle = captured.segments[len(captured.segments) // 2].fqn or "layers.4"
        raise PlanError(
            f"No split point was given for {captured.model_name}.",
            f"{argument('points', [middle])}, or {argument('stages', 2)}.",
        )
    options = options.on_ranks(options.schedule_of(len(starts) + 1).ranks)
    cut_plan = _cut(captured, split_points, starts)
    if recompute == AUTO:
        chosen = choose_recompute_at(captured, options, starts).with_branches()
        cut_plan = replace(cut_plan.predicted(chosen.predict()), priced=chosen.costs.priced)
        return cut_plan.with_relays() if relay_skips else cut_plan
    options = replace(options, recompute=parse_recompute(captured, recompute, len(starts) + 1))
    to_predict = balance, schedule, microbatches, memory_bytes, hardware, recompute
    is_predicted = options.training != OWN_DTYPES or any(arg is not None for arg in to_predict)
    cut_plan = _predicted(cut_plan, captured, options, starts) if is_predicted else cut_plan
    return cut_plan.with_relays() if relay_skips else cut_plan


def _check_types(
    captured: object, schedule: object, hardware: object, loss: object, setting: object, cache: object
) -> None:
    """Raise ArgumentError if an argument of `plan` has a wrong type. `PlanOptions` checks the numbers."""
    example = 'captured = pipegraph.capture(model, args=(tokens,)); pipegraph.plan(captured, points=["layers.4"])'
    require_type(captured, Captured, "plan() takes what pipegraph.capture returns", example)
    kinds = (str, Schedule, NoneType)
    require_type(schedule, kinds, "schedule is a name or a Schedule", "pipegraph.schedule.read_csv, which reads a file")
    profile = (Hardware, str, PathLike)
    described = "hardware is a profile, its name or its file, or one for each rank"
    require_type(hardware, (*profile, RankProfiles, Sequence, NoneType), described, 'hardware="h100"')
    for of_rank in () if isinstance(hardware, str) or not isinstance(hardware, Sequence) else hardware:
        require_type(of_rank, profile, described, 'hardware="h100*4,a100*4"')
    require_type(loss, (tuple, NoneType), "loss is a function and its target", "loss=(loss_fn, target)")
    if isinstance(loss, tuple) and (len(loss) != 2 or not callable(loss[0])):
        raise ArgumentError(f"loss is a function and its target, not {len(loss)} values.", "loss=(loss_fn, target).")
    require_type(setting, (MeasureOptions, NoneType), "setting is a MeasureOptions", "setting=MeasureOptions(device)")
    require_type(cache, (Cache, NoneType), "cache is a Cache", "cache=None")


def _best_plan(captured: Captured, options: PlanOptions, stages: int, is_auto: bool) -> Plan:
    """Cut a model into ``stages`` stages at the best points. If ``is_auto``, the recompute of each is chosen too."""
    options = options.on_ranks(options.schedule_of(stages).ranks)
    options.check_parameters_fit(captured)
    if is_auto or isinstance(options.recompute, tuple) or options.rank_profiles is not None:
        return plan_of(captured, choose_recompute(captured, options, stages, is_auto).with_branches())
    costs = options.price(captured, stages=stages)
    try:
        return plan_of(captured, refine_cuts(choose_cuts(costs, options, stages).with_branches()))
    except MemoryShortage as shortage:
        if options.recompute == _BLOCK:
            raise
        raise MemoryShortage(f"{shortage}\n{_with_recompute(captured, options, stages)}", shortage.peak) from None


def plan_of(captured: Captured, choice: CutChoice) -> Plan:
    """Return the plan of a model with these cuts. Prices may be of the model in another dtype."""
    priced = choice.costs.priced
    chain = priced.chain
    starts = [chain.segments[cut].start for cut in choice.cuts]
    cut_plan = _cut(captured, chain.points(choice.cuts), starts).predicted(choice.predict())
    return replace(cut_plan, priced=priced, solution=choice.solution)


def _cut(captured: Captured, points: Sequence[Point], starts: Sequence[int]) -> Plan:
    marked = mark(captured, points, starts)
    dump("marked", lambda: graph_text(marked.graph.nodes, "with split points"))
    return _plan_of(marked, points, divide_into_stages(marked))


def _plan_of(marked: Captured, points: Sequence[Point], divided: tuple[StageGraph, ...]) -> Plan:
    crossing = boundaries(marked, divided)
    dump("stages", lambda: stages_text(divided, crossing))
    cut_plan = Plan(captured=marked, points=tuple(points), stages=divided, boundaries=crossing, costs=())
    return replace(cut_plan, costs=tuple(_cost(cut_plan, stage) for stage in divided))


def _predicted(cut_plan: Plan, captured: Captured, options: PlanOptions, starts: Sequence[int]) -> Plan:
    """Return a plan of given cuts with a prediction."""
    method = options.balance
    options = replace(options, balance="time") if method == UNIFORM else options
    costs = options.price(captured, starts, stages=len(starts) + 1)
    begins = [segment.start for segment in costs.priced.chain.segments]
    search = f"{argument('stages', len(starts) + 1)} in place of points"
    instead = argument("balance", "time") if method == UNIFORM else search
    choice = given_cuts(costs, options, [begins.index(start) for start in starts], instead)
    return replace(cut_plan.predicted(structs.replace(choice.predict(), balance=method)), priced=costs.priced)


def _with_recompute(captured: Captured, options: PlanOptions, stages: int) -> str:
    """Say whether recomputing each block would make the memory enough."""
    options = replace(options, recompute=_BLOCK)
    try:
        peak = choose_cuts(options.price(captured), options, stages).peak
    except MemoryShortage as shortage:
        return (
            f"With {argument('recompute', 'block')}, which keeps the least, {format_bytes(shortage.peak)} would be "
            "enough.\n"
            f"Try: {argument('recompute', 'block')} with {argument('memory_bytes', bytes_option(shortage.peak))}, "
            "or more stages."
        )
    return (
        f"With {argument('recompute', 'block')} there are cuts that fit, and need {format_bytes(peak)}.\n"
        f"Try: {argument('recompute', 'block')}."
    )


def _cost(cut_plan: Plan, stage: StageGraph) -> StageCost:
    return stage_cost(
        stage.nodes,
        [cut_plan.captured.state[fqn] for fqn in stage.state],
        received=[boundary.node for boundary in cut_plan.stage_inputs(stage) if boundary.producer >= 0],
        sent=[boundary.node for boundary in cut_plan.stage_outputs(stage) if set(boundary.consumers) - {stage.index}],
    )


def _with_prediction(cost: StageCost, stage: StagePrediction, prediction: Prediction) -> StageCost:
    """Add what was predicted: for the dtype that is computed in and, of what ranks along tp divide, for one of them."""
    if stage.trained_bytes is not None:
        cost = structs.replace(cost, parameter_bytes=stage.parameter_bytes, trained_bytes=stage.trained_bytes)
    cost = structs.replace(
        cost,
        saved_bytes=stage.saved_bytes,
        weight_saved_bytes=stage.weight_saved_bytes,
        offloaded_bytes=stage.offloaded_bytes,
        transient_bytes=stage.transient_bytes,
        added_bytes=stage.added_bytes,
        optimizer_bytes=stage.optimizer_bytes,
    )
    if not prediction.in_seconds:
        return cost
    return structs.replace(cost, forward=stage.forward, input_grad=stage.input_grad, weight_grad=stage.weight_grad)
