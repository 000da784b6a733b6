"""The choices of what a stage computes again, from nothing to every layer, and the best ones with the cuts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipegraph.arguments import argument
from pipegraph.cost import SegmentCost
from pipegraph.cost.hardware import Link
from pipegraph.cost.price import PricedModel, mix
from pipegraph.cost.segments.chain import Chain
from pipegraph.errors import ArgumentError
from pipegraph.graph.captured import Captured, own_recompute
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.planner.cut_choice import CutChoice, choose_cuts, refine_cuts
from pipegraph.planner.plan_options import ChainCosts, PlanOptions, StagedCosts
from pipegraph.planner.solver.solve import MemoryShortage, Problem, Solution
from pipegraph.progress import report_progress
from pipegraph.recompute import OFFLOAD, Recompute, parse_stages
from pipegraph.schedule import Schedule

_PARTS = 8
_SPREAD = (0, 4, 2, 6, 1, 5, 3, 7)  # which of eight layers come first, so that any number of them is spread evenly
_MIXES = (("min-cut", "block", range(1, _PARTS)), ("none", "min-cut", (2, 4, 6)), ("none", "block", (2, 4, 6)))
"""(the choice for most, the choice for some layers, how many of eight these are)"""
_TRIES = 4
_UNIFORM_EFFORT = 0.2


class _Layer(NamedTuple):
    """A repeated layer: the list of modules that it is in, and its number there."""

    container: str
    number: int


@dataclass(frozen=True)
class RecomputeOptions:
    """What segments and stages cost with each choice.

    Attributes:
        recompute: the choices.
        costs: of the chain with each.
        uniform: those that are tried for all stages alike.
        allowed: those that each stage may have; None for all. With several profiles, positions among the choices on
            one of them.
        profiles: for each choice the position of its profile in `RankProfiles.distinct`; empty if ranks are equal.
    """

    recompute: tuple[Recompute, ...]
    costs: tuple[ChainCosts, ...]
    uniform: tuple[int, ...]
    allowed: tuple[tuple[int, ...], ...] | None = None
    profiles: tuple[int, ...] = ()

    @classmethod
    def of_stages(
        cls,
        captured: Captured,
        options: PlanOptions,
        of_stages: Sequence[Recompute],
        traced: dict[str, DividedFunction] | None = None,
    ) -> RecomputeOptions:
        """Price a model with the choice that each stage was given. ``traced`` is shared by prices."""
        traced = {} if traced is None else traced
        if options.rank_profiles is not None:
            return cls._on_profiles(options, lambda equal: cls.of_stages(captured, equal, of_stages, traced))
        distinct = tuple(dict.fromkeys(of_stages))
        costs = tuple(replace(options, recompute=choice).price(captured, traced=traced) for choice in distinct)
        return cls(distinct, costs, (), tuple((distinct.index(choice),) for choice in of_stages))

    @classmethod
    def price(
        cls,
        captured: Captured,
        options: PlanOptions,
        cut_positions: Collection[int] = (),
        traced: dict[str, DividedFunction] | None = None,
    ) -> RecomputeOptions:
        """Price a model with each choice. Segments are cut at the operations ``cut_positions`` in any case.

        ``traced`` is shared by prices. Raises as `PlanOptions.price` does.
        """
        traced = {} if traced is None else traced
        if options.rank_profiles is not None:
            return cls._on_profiles(options, lambda equal: cls.price(captured, equal, cut_positions, traced))
        containers = _containers(captured)
        block = Recompute.parse({f"{name}.*": "block" for name in containers} or "block")
        basic_choices = {"none": Recompute.parse("none"), "min-cut": Recompute.parse("min-cut"), "block": block}
        priced = {
            name: replace(options, recompute=choice).price(captured, cut_positions, traced).priced
            for name, choice in basic_choices.items()
        }
        recompute, costs = [*basic_choices.values()], [ChainCosts(model) for model in priced.values()]
        layers = _layers(priced["none"].chain, containers)
        if options.host_link is not None and not options.hardware.is_cpu and containers:  # a CPU only emulates it
            offload = Recompute.parse({f"{name}.*": OFFLOAD for name in containers})
            model = replace(options, recompute=offload).price(captured, cut_positions, traced).priced
            if _is_hidden(model, layers, options.host_link):
                recompute.append(offload)
                costs.append(ChainCosts(model))
        uniform = tuple(range(len(recompute)))
        for most, second, counts in _MIXES if containers else ():
            for count in counts:
                chosen = _SPREAD[:count]
                rules = {f"{name}[{first}::{_PARTS}]": second for name in containers for first in chosen}
                recompute.append(Recompute.parse({"": most, **rules}))
                choices = [most if layer is None or layer.number % _PARTS not in chosen else second for layer in layers]
                costs.append(ChainCosts(mix(priced, choices)))
        return cls(tuple(recompute), tuple(costs), uniform)

    @classmethod
    def _on_profiles(cls, options: PlanOptions, price: Callable[[PlanOptions], RecomputeOptions]) -> RecomputeOptions:
        """Price a model on the device of each profile. No choice is for all stages alike, because a stage has the
        profile of its rank."""
        assert options.rank_profiles is not None
        priced = [price(options.on_profile(profile)) for profile in options.rank_profiles.distinct]
        return cls(
            tuple(choice for choices in priced for choice in choices.recompute),
            tuple(costs for choices in priced for costs in choices.costs),
            (),
            priced[0].allowed,
            tuple(number for number, choices in enumerate(priced) for _ in choices.costs),
        )

    def _allowed_on(self, options: PlanOptions, schedule: Schedule) -> Sequence[Sequence[int]] | None:
        """Return the choices that each stage may have: those on the profile of its rank."""
        if options.rank_profiles is None:
            return self.allowed
        of_stages = []
        for stage, rank in enumerate(schedule.placement):
            number = options.rank_profiles.numbers[rank]
            choices = [at for at, profile in enumerate(self.profiles) if profile == number]
            of_stages.append(choices if self.allowed is None else [choices[at] for at in self.allowed[stage]])
        return of_stages

    def only(self, recompute: Collection[Recompute]) -> RecomputeOptions:
        """Return the same options with these choices only."""
        positions = [number for number, choice in enumerate(self.recompute) if choice in recompute]
        return RecomputeOptions(
            tuple(self.recompute[number] for number in positions),
            tuple(self.costs[number] for number in positions),
            tuple(positions.index(number) for number in self.uniform if number in positions),
        )

    def choose(self, options: PlanOptions, stages: int) -> CutChoice:
        """Choose cuts and, for each stage, what it computes again. No uniform choice that fits is better.

        The search adds up segments. If what it finds does not fit exactly, it continues with less memory.

        Raises:
            MemoryShortage: nothing fits.
            PlanError, ScheduleError: as `solve` does.
        """
        report_progress("looking for the best cuts and what to compute again")
        choices = [*self._uniform(options, stages)]
        memory, segments = options.memory_bytes, [costs.segments for costs in self.costs]
        for _ in range(_TRIES):
            try:
                problem = self._problem(options, segments, stages, memory)
                choice = self._choice(options, problem.solve(self.uniform, options.effort))
            except MemoryShortage:
                if not choices and memory is options.memory_bytes:
                    raise
                break
            if choice.fits:
                choices.append(refine_cuts(choice))
                break
            limits = options.memory_of_ranks(choice.schedule.ranks)
            figures = zip(limits, choice.memory, strict=True)
            memory = [max(0.0, limit - max(0.0, required_bytes - limit)) for limit, required_bytes in figures]
        if not choices:
            raise MemoryShortage(
                "No cuts and choices of what to compute again that were found fit into the memory, with what several "
                "stages hold.",
                choice.peak,
                choice.cuts,
                "more memory, or more stages.",
            )
        # The joint search's, which comes last, bounds all.
        bound = next((choice.solution for choice in reversed(choices) if choice.solution is not None), None)
        best = min(choices, key=lambda choice: choice.value)
        return replace(best, solution=bound)

    def choose_at(self, options: PlanOptions, cuts: Sequence[int]) -> CutChoice:
        """Choose for the stages of given cuts what each computes again. The choice has no solution: cuts were given.

        Raises:
            MemoryShortage: no choices fit.
        """
        report_progress("looking for what to compute again")
        stages = [costs.stages(cuts) for costs in self.costs]
        problem = self._problem(options, stages, len(cuts) + 1, options.memory_bytes)
        solution = problem.solve(effort=options.effort)
        return replace(self._choice(options, replace(solution, cuts=tuple(cuts))), solution=None)

    def _choice(self, options: PlanOptions, solution: Solution) -> CutChoice:
        costs = StagedCosts([self.costs[option] for option in solution.options])
        plan_options = replace(options, recompute=tuple(self.recompute[option] for option in solution.options))
        return CutChoice(costs, plan_options, solution.cuts, solution.schedule, solution)

    def _problem(
        self,
        options: PlanOptions,
        costs: Sequence[Sequence[SegmentCost]],
        stages: int,
        memory: float | Sequence[float] | None,
    ) -> Problem:
        """Return the choice of cuts and options, where segments cost ``costs`` with each option."""
        schedule = options.schedule_of(stages)
        return Problem(costs, schedule, memory, options.link, self._allowed_on(options, schedule), options.factors)

    def _uniform(self, options: PlanOptions, stages: int) -> Iterator[CutChoice]:
        for option in self.uniform:
            plan_options = replace(
                options, recompute=(self.recompute[option],) * stages, effort=_UNIFORM_EFFORT * options.effort
            )
            try:
                yield refine_cuts(replace(choose_cuts(self.costs[option], plan_options, stages), solution=None))
            except MemoryShortage:
                continue


def parse_recompute(captured: Captured, recompute: object, stages: int) -> Recompute | tuple[Recompute, ...]:
    """Return what a plan is for: one for all stages, or one for each; by default what the model itself says.

    Raises ArgumentError for what no plan can hold.
    """
    choices = parse_stages(own_recompute(captured) if recompute is None else recompute, stages)
    if any(choice.policies for choice in choices):
        raise ArgumentError(
            "recompute has a policy, which is a function: no plan can hold it.",
            "Pipeline(…, recompute=policy), and plan with what is the most like it.",
        )
    return choices[0] if len(set(choices)) == 1 else choices


def choose_recompute(captured: Captured, options: PlanOptions, stages: int, is_auto: bool) -> CutChoice:
    """Choose the best cuts if each stage has its own recompute: the given one, or a chosen one if ``is_auto``.

    Raises as `RecomputeOptions.choose` does, and ArgumentError if the balance is not a time.
    """
    if not options.timed:
        raise ArgumentError(
            f"{argument('balance', options.balance)} does not balance time, which a recompute for each stage changes.",
            f"{argument('balance', 'time')}, or one recompute for all stages.",
        )
    if is_auto:
        return RecomputeOptions.price(captured, options).choose(options, stages)
    recompute = options.recompute
    of_stages = (recompute,) * stages if isinstance(recompute, Recompute) else recompute
    return RecomputeOptions.of_stages(captured, options, of_stages).choose(options, stages)


def choose_recompute_at(captured: Captured, options: PlanOptions, starts: Sequence[int]) -> CutChoice:
    """Choose what the stages compute again that begin at these positions in ``Captured.nodes``, without the first's.

    Raises a MemoryShortage if no choices fit.
    """
    options = options if options.timed else replace(options, balance="time")
    priced = RecomputeOptions.price(captured, options, starts)
    begins = [segment.start for segment in priced.costs[0].priced.chain.segments]
    return priced.choose_at(options, [begins.index(start) for start in starts])


def _containers(captured: Captured) -> tuple[str, ...]:
    """The lists of modules of which the chain has two or more: ``layers`` of ``layers.0``, ``layers.1``, …"""
    counts: dict[str, int] = {}
    for segment in captured.segments:
        name, _, number = segment.fqn.rpartition(".")
        if name and number.isdecimal():
            counts[name] = counts.get(name, 0) + 1
    return tuple(name for name, count in counts.items() if count > 1)


def _layers(chain: Chain, containers: Sequence[str]) -> list[_Layer | None]:
    """Of each segment of a chain the layer that it is in, or None between layers; a layer has one as a whole."""
    positions: dict[int, _Layer] = {}
    for segment in chain.captured.segments:
        name, _, number = segment.fqn.rpartition(".")
        if name in containers:
            positions |= dict.fromkeys(range(segment.start, segment.stop), _Layer(name, int(number)))
    segment_layers: list[_Layer | None] = [None] * len(chain.segments)
    for layer in chain.layers:
        middle = (chain.segments[layer.start].start + chain.segments[layer.stop - 1].stop) // 2
        for index in layer:
            segment_layers[index] = positions.get(middle)
    return segment_layers


def _is_hidden(model: PricedModel, layers: Sequence[_Layer | None], link: Link) -> bool:
    """Whether each layer computes, in the shortest of its F, I and W, for as long as its copies to the host take: a
    stage of such layers has the time of one action for each copy."""
    sums: dict[_Layer, list[float]] = {}
    for cost, layer in zip(model.costs, layers, strict=True):
        if layer is not None:
            totals = sums.setdefault(layer, [0.0] * 4)
            figures = cost.forward, cost.input_grad, cost.weight_grad, cost.offloaded_bytes
            totals[:] = [total + figure for total, figure in zip(totals, figures, strict=True)]
    return all(
        link.seconds(offloaded) <= min((seconds for seconds in times if seconds), default=0.0)
        for *times, offloaded in sums.values()
        if offloaded
    )
